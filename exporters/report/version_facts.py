"""The facts of a version that the command line and the server print. They come from its manifest, without torch."""

from typing import Any

from ...models.store.store import Version


def facts_of(version: Version) -> dict[str, Any]:
    """The facts of a version that the command line prints; paths are relative to the store."""
    forms = {}
    for name, facts in version.manifest["forms"].items():
        file = facts.get("file")
        path = (
            {"path": f"models/{version.name}/{version.number}/{file}"} if file and version.has(file) else {}
        )
        forms[name] = {key: value for key, value in facts.items() if key != "file"} | path
    return {
        "model": version.name,
        "version": version.number,
        "digest": next((form["digest"] for form in forms.values() if form.get("digest")), version.digest),
        "status": version.status,
        "half": version.manifest["half"],
        "reason": version.manifest["reason"],
        "notes": version.manifest["notes"],
        "samples": version.manifest.get("samples"),
        "power": version.manifest.get("power"),
        "forms": forms,
    }
