"""The application on Ray Serve, for ``serve run halfeven.serve.ray:app store=…`` and ``serve.run(app(Options(…)))``."""

from ray import serve
from ray.serve import Application

from .one_writer import WRITER, OneWriter
from .options import Options
from .replica import Replica


def app(options: Options) -> Application:
    """Replicas that answer, and the one writer of the store, which loads no model. Raises BadSetting."""
    writer = serve.deployment(name=WRITER, num_replicas=1, ray_actor_options={"num_cpus": 0})(OneWriter)
    replicas = serve.deployment(name="halfeven", **options.deployment_options())(serve.ingress()(Replica))
    return replicas.bind(options, writer.bind(options))
