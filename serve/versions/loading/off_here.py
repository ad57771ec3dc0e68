"""Parts of a version may not be used on a device, because the selftest found them wrong there."""

import torch

from ....models.engines.switched_off import DEVICE, ONNX_HALF, TORCH_HALF, features_off
from ....models.errors import NotReady
from ....models.spec.spec import ModelSpec
from ....models.store.store import Version

_HALVES = {"torch": TORCH_HALF, "onnx": ONNX_HALF}


def refuse_where_off(version: Version, device: torch.device) -> None:
    """Raises NotReady where nothing may be served from the device."""
    if why := features_off(device).get(DEVICE):
        raise NotReady(
            f"{version}: nothing is served from {device}, because {why}; serve on another device, or mend this one and "
            "run `halfeven selftest` again, which switches it on where it passes"
        )


def form_off(form: str, device: torch.device) -> str | None:
    """The reason why a half of this form may not serve on the device; None where it may."""
    feature = _HALVES.get(form)
    why = features_off(device).get(feature) if feature is not None else None
    return f"the {form} form is switched off: {why}" if why else None


def halves_off(version: Version, spec: ModelSpec, device: torch.device) -> str | None:
    """The reason why no half of the version may serve on the device; None where one may, or there is no half."""
    asked = [spec.form] if spec.form != "auto" else ["torch", "onnx"]
    forms = [form for form in asked if version.manifest["forms"].get(form, {}).get("passed")]
    if version.manifest["half"] is None or not forms:
        return None
    sentences = [form_off(form, device) for form in forms]
    return "; ".join(filter(None, sentences)) if all(sentences) else None


def off_sentences(device: torch.device) -> list[str]:
    """One sentence for each feature that is off on the device, with its reason."""
    return [f"{name} switched off: {why}" for name, why in features_off(device).items()]
