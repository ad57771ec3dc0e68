"""ONNX Runtime whose nodes are placed where a test says."""

from types import SimpleNamespace

import pytest

from tests.simulated_gpu.onnx_session import Session


def placed(monkeypatch: pytest.MonkeyPatch, **providers: list[tuple[str, str]]) -> None:
    """Let sessions say that each of these nodes (operator, name) belongs to the provider."""
    info = [
        SimpleNamespace(
            ep_name=f"{provider}ExecutionProvider",
            get_nodes=lambda nodes=nodes: [SimpleNamespace(op_type=kind, name=name) for kind, name in nodes],
        )
        for provider, nodes in providers.items()
    ]
    monkeypatch.setattr(Session, "get_provider_graph_assignment_info", lambda self: info)
