"""Each HTTP route needs a key with one of its scopes, for the model that the request concerns.

A path that is not in the table needs `manage` for all models: a new route is closed until it has a line here. The
paths are compared as the routers compare them (percent-decoded, `{m}` is anything without a slash), whole and exactly.
"""

import re
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

from ...models.errors import Unauthenticated
from ..access.access_control import NO_KEY, OPEN, AccessControl, Permit
from ..access.keys import EVERY_MODEL, INFER, MANAGE, METRICS, SCOPES, TRAIN

TO_INFER = frozenset((INFER,))
TO_TRAIN = frozenset((TRAIN,))
TO_MANAGE = frozenset((MANAGE,))
_TO_SCRAPE = frozenset((METRICS,))
TO_COUNT = frozenset((INFER, MANAGE, METRICS))
_TO_DESCRIBE = frozenset((INFER, TRAIN, MANAGE))
TO_INSPECT = frozenset((TRAIN, MANAGE))
_TO_ASK_FOR_MORE = frozenset((INFER, MANAGE))  # what is answered with the way out only (501)
_ANY = frozenset(SCOPES)
_NO_MODEL, _NAMED = None, "m"
_READING = ("GET", "HEAD")
_PERMIT = "halfeven.permit"  # in the scope of a request

Need = tuple[frozenset[str], str | None]


class RouteRule(NamedTuple):
    """``methods``: () is any. ``model``: None, `EVERY_MODEL`, or `_NAMED` for the group ``m`` of the pattern."""

    methods: tuple[str, ...]
    pattern: re.Pattern[str]
    scopes: frozenset[str]
    model: str | None


def _rule(methods: Sequence[str], path: str, scopes: frozenset[str], model: str | None = _NAMED) -> RouteRule:
    """``path``: ``{m}`` is a model's name, ``{}`` any other part, ``{...}`` the rest."""
    pattern = path.replace("{m}", "(?P<m>[^/]+)").replace("{...}", ".*").replace("{}", "[^/]+")
    return RouteRule(tuple(methods), re.compile(pattern, re.DOTALL), scopes, model)


_RULES = (
    _rule((), "/v2/models/{m}(/versions/{})?/infer", TO_INFER),
    _rule((), "/v1/models/{m}(/versions/{})?:predict", TO_INFER),
    _rule((), "/v1/models/{m}:endpoint", TO_INFER),
    _rule(_READING, "/healthz|/v2/health/live|/v2/health/ready", NO_KEY, _NO_MODEL),
    _rule(_READING, r"/v2/?|/docs|/openapi\.json|/page\.js", _ANY, _NO_MODEL),
    _rule(_READING, "/metrics", _TO_SCRAPE, EVERY_MODEL),
    _rule(_READING, "/v1/models", _TO_DESCRIBE, EVERY_MODEL),
    # The pages: each names only the models and offers only the orders of the key (`dashboard/routes.py`).
    _rule(_READING, "/", _TO_DESCRIBE, _NO_MODEL),
    _rule(_READING, "/events", TO_INSPECT, _NO_MODEL),
    _rule(_READING, "/jobs", TO_TRAIN, _NO_MODEL),
    _rule(_READING, "/models/{m}", _TO_DESCRIBE),
    _rule(("POST",), "/models/{m}/try", TO_INFER),
    _rule(("POST",), "/models/{m}/(promote|rollback|canary|shadow)", TO_MANAGE),
    _rule(_READING, "/v2/models/stats", TO_COUNT, EVERY_MODEL),
    _rule(_READING, "/v2/models/{m}(/versions/{})?/stats", TO_COUNT),
    _rule(_READING, "/v2/models/{m}(/versions/{})?(/ready|/config)?", _TO_DESCRIBE),
    _rule(("POST",), "/v2/repository/index", _TO_DESCRIBE, EVERY_MODEL),
    _rule(("POST",), "/v2/repository/models/{m}/(load|unload)", TO_MANAGE),
    _rule(_READING, "/v1/models/{m}(/versions|/events|/drift)?", TO_INSPECT),
    _rule(_READING, "/v1/models/{m}/versions/{}(/report|/plan|/lineage)?", TO_INSPECT),
    _rule(("POST",), "/v1/models/{m}/(promote|canary|shadow|rollback)", TO_MANAGE),
    # A job names its model in its body or its record: `finetune/web/api.py` checks it there. Jobs and files belong to
    # the key that made them: each key sees its own.
    _rule(("POST",), "/v1/fine_tuning/jobs", TO_TRAIN, _NO_MODEL),
    _rule(_READING, "/v1/fine_tuning/jobs", TO_TRAIN, _NO_MODEL),
    _rule(("GET", "HEAD", "POST"), "/v1/fine_tuning/jobs/{}(/{})?", TO_TRAIN, _NO_MODEL),
    _rule(("POST",), "/v1/files", TO_TRAIN, _NO_MODEL),
    _rule(_READING, "/v1/files", TO_TRAIN, _NO_MODEL),
    _rule(_READING, "/v1/files/{}(/content)?", TO_TRAIN, _NO_MODEL),
    _rule(("DELETE",), "/v1/files/{}", TO_TRAIN, _NO_MODEL),
    _rule((), "/v2/models/{m}/(generate|generate_stream|trace/setting)", _TO_ASK_FOR_MORE),
    _rule((), "/v2/(trace/setting|logging|repository/{}/index)", _TO_ASK_FOR_MORE, _NO_MODEL),
    _rule((), "/v2/(system|cuda)sharedmemory/{...}", _TO_ASK_FOR_MORE, _NO_MODEL),
)


def need_of(method: str, path: str) -> Need:
    """The scopes (a key needs one) and the model of a request, for `AccessControl.admit`. ``path``: percent-decoded."""
    found = rule_of(method, path)
    if found is None:
        return TO_MANAGE, EVERY_MODEL
    rule, match = found
    return rule.scopes, match["m"] if rule.model == _NAMED else rule.model


def rule_of(method: str, path: str) -> tuple[RouteRule, re.Match[str]] | None:
    """The first rule for the path and the method."""
    for rule in _RULES:
        if not rule.methods or method in rule.methods:
            match = rule.pattern.fullmatch(path)
            if match is not None:
                return rule, match
    return None


def admit(access: AccessControl, scope: MutableMapping[str, Any]) -> Permit:
    """Admit the request of an ASGI scope; routes find the permit by `permit_of`. Raises as `AccessControl.admit`."""
    authorization = authorization_in(scope)
    need = need_of(scope.get("method", "CONNECT"), scope["path"])
    permit = scope[_PERMIT] = access.admit(authorization, *need)
    return permit


def authorization_in(scope: MutableMapping[str, Any]) -> str | None:
    """The request's Authorization header. Raises Unauthenticated where it has several."""
    sent = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(sent) > 1:
        raise Unauthenticated(f"the request has {len(sent)} Authorization headers; send one")
    return sent[0].decode("latin-1") if sent else None


def permit_of(scope: MutableMapping[str, Any]) -> Permit:
    """The request's permit; where `admit` gave none (an application without a front), that of a server without keys."""
    return scope.get(_PERMIT) or OPEN
