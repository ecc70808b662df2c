"""papermill engine "truthful": a saved notebook says how its run really ended.

papermill's own engine reports a hung cell, and all that never ran, as completed, and leaves what
the notebook started behind. This one marks the running cell failed, keeps later cells pending,
stores `metadata.papermill.stop_reason` and ends every process of the notebook.
"""

import asyncio
import contextlib
import os
import signal
import threading

from papermill.engines import Engine, NotebookExecutionManager, papermill_engines
from papermill.log import logger

from nsa.workbook.client import Stop, TruthfulClient
from nsa.workbook.files import write_notebook


class TruthfulManager(NotebookExecutionManager):
    """Saves atomically, and leaves a cell that never ran pending."""

    def save(self, **kwargs):
        if self.output_path:
            write_notebook(self.output_path, self.nb)
        self.last_save_time = self.now()

    def notebook_complete(self, **kwargs):
        stopped = self.nb.metadata.papermill.get("stop_reason") != "ok"
        before = [cell.metadata.papermill["status"] for cell in self.nb.cells]
        super().notebook_complete(**kwargs)
        if stopped:
            for cell, status in zip(self.nb.cells, before, strict=True):
                cell.metadata.papermill["status"] = status
            self.nb.metadata.papermill["exception"] = True
            self.save()


NAME = "truthful"
STOP_REASONS = ("ok", "error", "timeout", "kernel_died", "terminated", "interrupted")
SIGNALS = {
    signal.SIGTERM: Stop("terminated", "Terminated", "the runner was asked to end (SIGTERM)"),
    signal.SIGINT: Stop("interrupted", "KeyboardInterrupt", "the run was interrupted (Ctrl-C)"),
}


class TruthfulEngine(Engine):
    """Options: `timeout_s` for the whole notebook, `cell_timeout_s` (or papermill's own
    `execution_timeout`) for one cell, `environment` of the kernel, `kernel_cwd`, `kernel_log`
    (open file for what the kernel writes outside cells), `on_output` (called with each output).
    """

    @classmethod
    def execute_notebook(
        cls,
        nb,
        kernel_name,
        output_path=None,
        progress_bar=True,
        log_output=False,
        autosave_cell_every=30,
        **options,
    ):
        manager = TruthfulManager(
            nb,
            output_path=output_path,
            progress_bar=progress_bar,
            log_output=log_output,
            autosave_cell_every=autosave_cell_every,
        )
        nb.metadata.papermill["stop_reason"] = None
        manager.notebook_start()
        try:
            cls.execute_managed_notebook(manager, kernel_name, log_output=log_output, **options)
        finally:
            manager.cleanup_pbar()
            manager.notebook_complete()
        return manager.nb

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man,
        kernel_name,
        log_output=False,
        stdout_file=None,
        stderr_file=None,
        start_timeout=60,
        execution_timeout=None,
        timeout_s=None,
        cell_timeout_s=None,
        environment=None,
        kernel_cwd=None,
        kernel_log=None,
        on_output=None,
        **unused,
    ):
        client = TruthfulClient(
            nb_man,
            cell_timeout_s=cell_timeout_s or execution_timeout,
            timeout_s=timeout_s,
            on_output=on_output,
            startup_timeout=start_timeout,
            log=logger,
            log_output=log_output,
            stdout_file=stdout_file,
            stderr_file=stderr_file,
            coalesce_streams=True,
            # a busy machine delivers the last outputs late; the default of 4 s calls that an error
            iopub_timeout=60,
        )
        environment = dict(os.environ if environment is None else environment)
        reason = "error"
        try:
            with _signals_stop(client):
                reason = _run(
                    client.run(environment=environment, cwd=kernel_cwd, kernel_log=kernel_log)
                )
        finally:
            nb_man.nb.metadata.papermill["stop_reason"] = reason


def register() -> str:
    """Make papermill know the engine, also where the package's entry points are not installed."""
    papermill_engines.register(NAME, TruthfulEngine)
    return NAME


def _run(coroutine) -> str:
    """Run to the end, from a plain program as well as from inside a running loop (Jupyter)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    results: list = []
    thread = threading.Thread(target=lambda: results.append(_outcome(coroutine)))
    thread.start()
    thread.join()
    value, error = results[0]
    if error is not None:
        raise error
    return value


def _outcome(coroutine) -> tuple:
    try:
        return asyncio.run(coroutine), None
    except BaseException as error:  # handed to the thread that waits
        return None, error


@contextlib.contextmanager
def _signals_stop(client: TruthfulClient):
    """SIGTERM and Ctrl-C stop the client while this lasts; the old handlers come back after."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda _n, _frame, stop=stop: client.stop(stop))
        for number, stop in SIGNALS.items()
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
