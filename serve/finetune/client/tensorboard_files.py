"""A job's series as a TensorBoard event file, written by tensorboardX (extra ``halfeven[tensorboard]``)."""

from pathlib import Path

from ....models.errors import BadSetting
from .job_record import JobRecord, replaced


def write_tensorboard(record: JobRecord, folder: Path) -> Path:
    """``folder/MODEL-JOB``, which TensorBoard shows as one run; written again, it takes the earlier one's place.

    Steps have no time of their own: the wall time of each is that of the job's beginning. Raises BadSetting where
    tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise BadSetting(
            "--tensorboard needs the tensorboardX library: pip install 'halfeven[tensorboard]'"
        ) from None
    run = folder / f"{record.model}-{record.id}"
    with replaced(run) as draft:
        writer = SummaryWriter(str(draft))
        try:
            for name, points in record.series.items():
                for step, value in points:
                    writer.add_scalar(name, value, step, walltime=record.began_s)
            settings = "\n".join(f"    {name} = {value}" for name, value in record.settings.items())
            writer.add_text("settings", settings, 0, walltime=record.began_s)
        finally:
            writer.close()
    return run
