"""The application on Ray Serve, for ``serve run halfeven.serve.ray:app store=…`` and ``serve.run(app(Options(…)))``."""

from ray import serve
from ray.serve import Application

from .one_writer import OneWriter
from .options import Options
from .replica import Replica


def app(options: Options) -> Application:
    """Replicas that answer, and the one writer of the store. Raises BadSetting."""
    deployment = serve.deployment(name="halfeven", **options.deployment_options())
    return deployment(serve.ingress()(Replica)).bind(options, OneWriter.bind(options))
