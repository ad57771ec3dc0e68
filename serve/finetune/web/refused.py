"""Fine-tuning on a server that does not train: its routes say why, and where to train."""

from fastapi import FastAPI, Response

from ...http.error_mapping import NotOffered


def refuse_training(app: FastAPI, why: str) -> None:
    """Answer every route of files and jobs with 501 and the reason."""

    async def refuse() -> Response:
        raise NotOffered(why)

    for path in ("/v1/files", "/v1/files/{rest:path}", "/v1/fine_tuning/{rest:path}", "/jobs"):
        app.add_api_route(path, refuse, methods=["GET", "POST", "DELETE"], include_in_schema=False)
