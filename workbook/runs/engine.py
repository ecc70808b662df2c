"""papermill engine "truthful": a saved notebook shows how its run really ended.

papermill's own engine reports a hung cell, and all that never ran, as completed, and leaves
processes of the notebook behind. This one marks the running cell failed, keeps later cells pending,
stores `metadata.papermill.stop_reason` and ends every process of the notebook.
"""

import asyncio
import contextlib
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor

import nbformat
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbclient.util import ensure_async
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, NotebookExecutionManager, papermill_engines
from papermill.log import logger

from whyhung.process import family
from workbook.runs.files import write_notebook
from workbook.runs.kernel import kernel_manager
from workbook.runs.signals import signals_handled


class Stop(Exception):
    """Early end of a run: `reason` as stored, `ename` and the message as shown in the cell."""

    def __init__(self, reason: str, ename: str, message: str):
        super().__init__(message)
        self.reason, self.ename = reason, ename


class TruthfulClient(PapermillNotebookClient):
    """Runs the cells one by one until the end, a failure, a deadline or a stop from outside.

    The kernel and every process it started are gone when `run` returns, in every case.
    """

    def __init__(self, nb_man, *, cell_timeout_s=None, timeout_s=None, on_output=None, **options):
        super().__init__(nb_man, km=kernel_manager(options.get("config")), **options)
        self.cell_timeout_s, self.timeout_s, self.on_output = cell_timeout_s, timeout_s, on_output
        self.cookie = family.new_cookie()
        self.unsaved, self._asked = False, Future()

    def stop(self, stop: Stop) -> None:
        """Request an early end; safe from signal handlers and other threads."""
        if not self._asked.done():
            self._asked.set_result(stop)

    async def run(self, *, environment: dict[str, str], cwd: str | None, kernel_log=None) -> str:
        """Execute everything; returns the stop reason, and leaves the failure in its cell."""
        self._outside = asyncio.wrap_future(self._asked)
        self.reset_execution_trackers()
        loop = asyncio.get_running_loop()
        deadline = None if self.timeout_s is None else loop.time() + self.timeout_s
        saver = asyncio.ensure_future(self._save_now_and_then())
        try:
            work = self._start(environment, cwd, kernel_log)
            try:
                stopped = await self._race(work, None, deadline, "starting the kernel")
            except (RuntimeError, OSError) as error:
                stopped = Stop("error", "KernelStartError", f"the kernel did not start: {error}")
            if isinstance(stopped, Stop):
                self._fail_before_cells(stopped)
                return stopped.reason
            return await self._run_cells(deadline)
        finally:
            saver.cancel()
            await self._end_kernel()
            self._outside.cancel()  # it accepts no more stops

    async def _start(self, environment, cwd, kernel_log) -> None:
        await self.async_start_new_kernel(
            env=family.environment(environment, self.cookie),
            cwd=cwd,
            stdout=kernel_log,
            stderr=kernel_log,
        )
        await self.async_start_new_kernel_client()
        info = await self.async_wait_for_reply(self.kc.kernel_info())
        self.nb.metadata["language_info"] = info["content"]["language_info"]

    async def _run_cells(self, deadline: float | None) -> str:
        for index, cell in enumerate(self.nb.cells):
            self.nb_man.cell_start(cell, index)
            reason, work = "ok", self.async_execute_cell(cell, index)
            try:
                stopped = await self._race(work, self.cell_timeout_s, deadline, "the cell")
                if isinstance(stopped, Stop):
                    self._mark(cell, stopped)
                    reason = stopped.reason
            except CellExecutionError:
                reason = "error"
            if reason != "ok":
                self.nb_man.cell_exception(cell, cell_index=index)
            self.nb_man.cell_complete(cell, cell_index=index)
            if reason != "ok":
                return reason
        self.set_widgets_metadata()
        return "ok"

    async def _race(self, work, limit_s, deadline, what):
        """Await `work`; returns a Stop instead of its result if a limit or a stop came first."""
        loop = asyncio.get_running_loop()
        limits = [(limit_s, f"{what} ran longer than its {limit_s:g} s")] if limit_s else []
        if deadline is not None:
            message = f"the notebook ran longer than its {self.timeout_s:g} s"
            limits.append((max(0.0, deadline - loop.time()), message))
        limit_s, message = min(limits, default=(None, ""))
        task = asyncio.ensure_future(work)
        await asyncio.wait(
            {task, self._outside}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
        )
        if self._outside.done():
            # recent output may not have arrived yet
            await asyncio.wait({task}, timeout=0.3)
            await _cancelled(task)
            return self._outside.result()
        if not task.done():
            if self.kc is not None:  # interrupted: if it can still respond, it shows where it hangs
                with contextlib.suppress(Exception):
                    await ensure_async(self.km.interrupt_kernel())
                await asyncio.wait({task}, timeout=1.5)
            await _cancelled(task)
            return Stop("timeout", "CellTimeoutError", message)
        try:
            return task.result()
        except DeadKernelError:
            code = process.poll() if (process := self._process()) else None
            how = f" with exit code {code}"
            if code is None or code < 0:
                how = "" if code is None else f" of {family.signal_name(-code)}"
            return Stop("kernel_died", "DeadKernelError", f"the kernel died{how}")
        except CellTimeoutError as error:
            return Stop("timeout", "CellTimeoutError", str(error))

    def _process(self):
        """Popen of the kernel, or None before there is one."""
        return getattr(getattr(self.km, "provisioner", None), "process", None)

    def _mark(self, cell, stopped: Stop) -> None:
        if cell.cell_type == "code":
            content = {"ename": stopped.ename, "evalue": str(stopped)}
            content["traceback"] = [f"\x1b[31m{stopped.ename}\x1b[39m: {stopped}"]
            cell.outputs.append(nbformat.v4.new_output("error", **content))

    def _fail_before_cells(self, stopped: Stop) -> None:
        """Mark the first code cell as failed with the reason, if nothing ran yet."""
        for index, cell in enumerate(self.nb.cells):
            if cell.cell_type == "code":
                self._mark(cell, stopped)
                self.nb_man.cell_exception(cell, cell_index=index)
                return

    async def _end_kernel(self) -> None:
        # Before the shutdown, which reaps the kernel: until then its pid is not reused and leads to
        # children that dropped the environment.
        process = self._process()
        roots = {process.pid} if process and process.returncode is None else set()
        left = await asyncio.to_thread(family.end_family, self.cookie, roots)
        if left:
            self.log.error(f"{len(left)} processes of the notebook could not be killed")
        with contextlib.suppress(Exception):
            if self.km.has_kernel:
                await ensure_async(self.km.shutdown_kernel(now=True))
        with contextlib.suppress(Exception):
            await ensure_async(self.km.cleanup_resources())
        with contextlib.suppress(Exception):
            await ensure_async(self.kc.stop_channels())
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _save_now_and_then(self) -> None:
        """Save periodically, also without a message: a silent hang must not lose earlier lines."""
        while True:
            await asyncio.sleep(2.0)
            if self.unsaved:
                self.unsaved = False
                self.nb_man.save()

    def process_message(self, *args, **kwargs):
        output = super().process_message(*args, **kwargs)
        self.unsaved = True
        if output is not None and self.on_output:
            self.on_output(output)
        return output


async def _cancelled(task) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class TruthfulManager(NotebookExecutionManager):
    """Saves atomically, and keeps a cell that never ran pending."""

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
    def execute_notebook(cls, nb, kernel_name, **options):

        def given(*names):
            return {name: options[name] for name in names if name in options}

        saved = given("output_path", "progress_bar", "log_output", "autosave_cell_every")
        manager = TruthfulManager(nb, **saved)
        nb.metadata.papermill["stop_reason"] = None
        manager.notebook_start()
        reason = "error"
        try:
            client = TruthfulClient(
                manager,
                cell_timeout_s=options.get("cell_timeout_s") or options.get("execution_timeout"),
                startup_timeout=options.get("start_timeout", 60),
                log=logger,
                coalesce_streams=True,
                # a busy machine delivers the last outputs late, an error after the default of 4 s
                iopub_timeout=60,
                **given("timeout_s", "on_output", "log_output", "stdout_file", "stderr_file"),
            )
            work = client.run(
                environment=dict(options.get("environment", os.environ)),
                cwd=options.get("kernel_cwd"),
                kernel_log=options.get("kernel_log"),
            )

            def stop(number, _frame):
                client.stop(SIGNALS[number])

            with signals_handled(dict.fromkeys(SIGNALS, stop)):
                reason = _run(work)
        finally:
            nb.metadata.papermill["stop_reason"] = reason
            manager.cleanup_pbar()
            manager.notebook_complete()
        return manager.nb


def register() -> str:
    """Register the engine with papermill, also if the package's entry points are not installed."""
    papermill_engines.register("truthful", TruthfulEngine)
    return "truthful"


def _run(coroutine) -> str:
    """Run to the end, from a plain program as well as from inside a running loop (Jupyter)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(asyncio.run, coroutine).result()
