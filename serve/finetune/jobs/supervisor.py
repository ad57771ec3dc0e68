"""Takes queued jobs, as many at once as it may, and runs each to its end in a thread (`job_runner.py`).

These threads alone change the state of running jobs in the job store; the child processes only report to them through
their pipes, and end when the server ends. Training and conversion are never done in this process: serving has the
cores first.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ....models.errors import HalfevenError, NotReady
from ....models.files.durable import no_space_left
from ....models.machine.control_groups import usable_memory
from ....models.machine.usable_cores import usable_cores
from ....models.order.one_order import SHARE
from ....models.store.reserve import with_reserve
from ....models.store.store import Store
from ...batching.place import Place
from ...settings import Settings
from ...versions.roster import Roster
from ..data.kept_files import KeptFiles
from .choices.hyperparameter_table import REFUSE
from .job_folder import StateUnread
from .job_runner import JobRunner
from .records.job_store import JobStore
from .records.job_types import (
    ACTIVATING,
    CANCELLED,
    DISK_FULL,
    DISK_FULL_MESSAGE,
    FAILED,
    QUEUED,
    RUNNING,
    JobRow,
)
from .training_request import TrainingPlace
from .worker_process import Cancelled, JobFailed, Paused, ServerStops

logger = logging.getLogger("halfeven.finetune")
_GOES_ON = "job %s goes on with the next server"
READ_AGAIN_S = 60.0
TIDY_EVERY_S = 60.0  # so long at most an expired file stays that no job needs
_LOOK_EVERY_S = 0.2  # whether the server ends while its models are made ready


class Supervisor:
    """``training`` is the trainer's, which yields to serving. ``at_once``: so many jobs run beside each other."""

    def __init__(
        self, job_store: JobStore, kept: KeptFiles, store: Store, roster: Roster, place: Place,
        training: TrainingPlace, at_once: int = 1,
    ) -> None:  # fmt: skip
        self._job_store, self._kept, self._store, self._roster = job_store, kept, store, roster
        self._at_once, self._running = at_once, dict[str, threading.Thread]()
        self._bell = threading.Event()
        self._stopping = threading.Event()
        self._clock, self._tidy_at = time.monotonic, -math.inf
        self._runner = JobRunner(
            job_store, kept.files, store, roster, place, self._stopping, training, at_once
        )
        self._thread = threading.Thread(target=self._live, name="halfeven-finetune", daemon=True)

    def start(self) -> None:
        """Settle what an earlier server left, then take jobs."""
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread: there may be a job."""
        self._bell.set()

    def stop(self, timeout_s: float) -> None:
        """Stop the running process; its job goes on where the next server starts."""
        self._stopping.set()
        self._bell.set()
        self._thread.join(timeout_s)

    def _live(self) -> None:
        self._await_models()
        while not self._stopping.is_set():
            try:
                self._runner.remove_ended()  # first: it makes the room that what follows may need
                # The set is taken before the jobs are read: what has ended since is none that was left.
                running = set(self._running)
                for id in self._job_store.unfinished(RUNNING):
                    if id not in running:
                        self._take_up(self._job_store.job(id))
                if (job := self._next()) is not None:
                    self._start(job)
                    continue
            except Exception:  # for example a full disk: the thread goes on, and tries again
                logger.exception("the next job could not be taken; trying again")
                self._tidy()
                self._bell.clear()  # else the wait would be none
                self._bell.wait(1.0)
                continue
            self._bell.wait(self._tidy())
            self._bell.clear()
        for running in list(self._running.values()):
            running.join()

    def _tidy(self) -> float:
        """Delete the files that have expired, and the records of old jobs, once in `TIDY_EVERY_S`; gives the seconds
        until the next time."""
        if (now := self._clock()) >= self._tidy_at:
            self._tidy_at = now + TIDY_EVERY_S
            for work in (self._kept.delete_expired, self._job_store.forget_old):
                try:
                    work()
                except Exception:  # for example a full disk: jobs are taken all the same
                    logger.exception("old files or jobs could not be deleted; trying again")
        return self._tidy_at - now

    def _next(self) -> JobRow | None:
        """The queued job that has waited longest and may run beside those that run. Of jobs of one model, each of which
        may end with another active version than it began with, only those run beside each other that say what then
        (`stale_parent`)."""
        running = set(self._running)  # before the jobs are read, as in `_live`
        if len(running) >= self._at_once:
            return None
        beside = [job for job in map(self._job_store.job, running) if not job.finished]
        # One at a time: a thousand may wait, each with settings as long as its model's outputs are wide.
        waiting = (id for id in self._job_store.unfinished(QUEUED) if id not in running)
        queued = (job for job in map(self._job_store.job, waiting) if job.status == QUEUED)
        return next((job for job in queued if not any(_would_end_stale(job, one) for one in beside)), None)

    def _start(self, job: JobRow) -> None:
        def run() -> None:
            try:
                self._guarded(job, partial(self._runner.go, job))
            except Exception:  # what became of it could not be written: it is taken up again
                logger.exception("job %s could not be settled", job.id)
            finally:
                del self._running[job.id]
                self._bell.set()

        name = f"halfeven-finetune-{job.id}"
        self._running[job.id] = threading.Thread(target=run, name=name, daemon=True)
        try:
            self._running[job.id].start()
        except BaseException:  # the system has no thread left: the job keeps its turn, and takes no place
            del self._running[job.id]
            raise

    def _await_models(self) -> None:
        """Wait until the models of the store are ready, or the server ends: a job asks the active version."""
        while not self._stopping.is_set():
            with suppress(TimeoutError):
                self._roster.wait(_LOOK_EVERY_S)
                return

    def _guarded(self, job: JobRow, work: Callable[[], None]) -> None:
        """Run ``work``; any error in it ends this job only, with its reason."""
        try:
            work()
        except ServerStops:
            logger.info(_GOES_ON, job.id)
        except Cancelled:
            self._guarded(job, partial(self._cancelled, job))
        except Paused:
            self._paused(job)
        except StateUnread as error:
            self._put_off(job, error)
        except JobFailed as error:
            self._fail(job, error.code, str(error), error.version)
        except HalfevenError as error:
            # While the server ends, its versions are unloaded although the job still asks them.
            if isinstance(error, NotReady) and self._stopping.is_set():
                logger.info(_GOES_ON, job.id)
            else:
                self._fail(job, error.code.upper(), str(error))
        except Exception as error:
            if no_space_left(error):
                self._fail(job, DISK_FULL, DISK_FULL_MESSAGE)
                return
            logger.exception("job %s failed by a mistake of ours", job.id)
            message = f"internal error: {type(error).__name__}: {error}; the server's log has the traceback"
            self._fail(job, "INTERNAL", message)

    def _put_off(self, job: JobRow, error: StateUnread) -> None:
        """Leave a job as it is for `READ_AGAIN_S`, or until the server ends: then it is taken up again. Where it is to
        be cancelled, end it."""
        if self._job_store.job(job.id).cancel_requested:
            self._guarded(job, partial(self._cancelled, job))
            return
        logger.error("job %s is put off: %s", job.id, error, exc_info=error)
        self._job_store.record(job.id, "warn", f"{error}; it is tried again in {READ_AGAIN_S:g} s")
        self._stopping.wait(READ_AGAIN_S)

    def _fail(self, job: JobRow, code: str, message: str, version: int | None = None) -> None:
        # Callers read the message without the server's folders.
        logger.warning("job %s failed: %s: %s", job.id, code, message)
        fail = partial(self._job_store.move, job.id, FAILED, code=code, message=message, version=version)
        try:
            if code == DISK_FULL:
                self._runner.remove(job.id)  # the end of the job has to be written too
            if not self._job_store.job(job.id).finished:
                with_reserve(self._store.root, fail)
        except Exception:
            logger.exception("the end of job %s could not be written: %s %s", job.id, code, message)

    def _cancelled(self, job: JobRow) -> None:
        version = self._runner.published(job)
        message = "cancelled while it was running"
        number = None
        # The request to cancel came too late.
        if version is not None and self._store.live_number(job.name) == version.number:
            self._runner.conclude(job.id, version)
            return
        if version is not None:
            number, message = version.number, f"cancelled: {version} was published, and not made active"
        self._job_store.move(job.id, CANCELLED, code="CANCELLED", message=message, version=number)

    def _paused(self, job: JobRow) -> None:
        if self._job_store.has_stopped(job.id).cancel_requested:
            self._guarded(job, partial(self._cancelled, job))

    def _take_up(self, job: JobRow) -> None:
        """No process runs this job, since its server ended or what became of it could not be written: it goes on from
        where it was."""
        if job.cancel_requested:
            self._guarded(job, partial(self._cancelled, job))
            return
        if job.pause_requested and job.stage != ACTIVATING:
            self._paused(job)
            return
        message = "no process runs this job any more; it goes on from its last checkpoint"
        stage = ACTIVATING if job.stage == ACTIVATING else QUEUED
        self._job_store.move(job.id, QUEUED, stage=stage, message=message)


def _would_end_stale(one: JobRow, other: JobRow) -> bool:
    """True if one of two jobs that run at the same time can end only as stale, because of the other job's version."""
    return one.name == other.name and any(
        job.hyperparameters.get("stale_parent", REFUSE) == REFUSE for job in (one, other)
    )


def jobs_at_once(settings: Settings, device: str) -> int:
    """The number of jobs at once: as asked for, on a processor at most as many as its cores hold with all threads."""
    asked, cores = settings.jobs, usable_cores()
    most = max(1, cores // (settings.trainer_threads * settings.trainer_processes))
    if device == "cuda" or asked <= most:
        return asked
    logger.warning("--jobs %d: %d cores hold %d trainers, so %d jobs run at once", asked, cores, most, most)
    return most


def trainer_memory(settings: Settings, device: str, at_once: int = 1) -> int:
    """The bytes of private memory that each of ``at_once`` trainers may have; 0: no limit. On a CUDA device there is
    a limit only where one was asked for: the driver's mappings count too."""
    if settings.trainer_memory_mib is not None:
        return settings.trainer_memory_mib * 2**20
    return 0 if device == "cuda" else int(SHARE * usable_memory()) // at_once
