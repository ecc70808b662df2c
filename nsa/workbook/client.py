"""A notebook client that can be stopped at any moment and leaves no process behind."""

import asyncio
import contextlib

import nbformat
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbclient.util import ensure_async
from papermill.clientwrap import PapermillNotebookClient

from nsa.lab.process import family
from nsa.workbook.interpreter import kernel_manager


class Stop(Exception):
    """Why the run ends early: `reason` as stored, `ename` and the message as shown in the cell."""

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
        self.unsaved = False
        self._outside: asyncio.Future | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: Stop | None = None

    def stop(self, stop: Stop) -> None:
        """Ask for an early end; safe from signal handlers and other threads."""
        self._asked = self._asked or stop
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: the run is over
                self._loop.call_soon_threadsafe(self._pass_on)

    def _pass_on(self) -> None:
        if self._outside is not None and not self._outside.done():
            self._outside.set_result(self._asked)

    async def run(self, *, environment: dict[str, str], cwd: str | None, kernel_log=None) -> str:
        """Execute everything; returns the stop reason, and leaves the failure in its cell."""
        self._loop = asyncio.get_running_loop()
        self._outside = self._loop.create_future()
        if self._asked:
            self._pass_on()
        self.reset_execution_trackers()
        deadline = None if self.timeout_s is None else self._loop.time() + self.timeout_s
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
            reason = "ok"
            try:
                stopped = await self._race(
                    self.async_execute_cell(cell, index), self.cell_timeout_s, deadline, "the cell"
                )
            except CellExecutionError:
                stopped, reason = None, "error"
            if isinstance(stopped, Stop):
                self._mark(cell, stopped)
                reason = stopped.reason
            if reason != "ok":
                self.nb_man.cell_exception(cell, cell_index=index)
            self.nb_man.cell_complete(cell, cell_index=index)
            if reason != "ok":
                return reason
        self.set_widgets_metadata()
        return "ok"

    async def _race(self, work, limit_s, deadline, what):
        """Await `work`; a Stop comes back, instead of its result, when something else was first."""
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
            # what was printed a moment ago is still on its way
            await asyncio.wait({task}, timeout=0.3)
            await _cancelled(task)
            return self._outside.result()
        if not task.done():
            await self._show_where_it_hangs(task)
            await _cancelled(task)
            return Stop("timeout", "CellTimeoutError", message)
        try:
            return task.result()
        except DeadKernelError:
            return Stop("kernel_died", "DeadKernelError", f"the kernel died{self._how_it_ended()}")
        except CellTimeoutError as error:
            return Stop("timeout", "CellTimeoutError", str(error))

    async def _show_where_it_hangs(self, task) -> None:
        """Interrupt a kernel past its deadline: if it can still answer, its traceback is kept."""
        if self.kc is not None:
            with contextlib.suppress(Exception):
                await ensure_async(self.km.interrupt_kernel())
            await asyncio.wait({task}, timeout=1.5)

    def _how_it_ended(self) -> str:
        process = self._process()
        code = process.poll() if process is not None else None
        if code is None:
            return ""
        return f" of {family.signal_name(-code)}" if code < 0 else f" with exit code {code}"

    def _process(self):
        """The kernel's Popen, or None before there is one."""
        return getattr(getattr(self.km, "provisioner", None), "process", None)

    def _mark(self, cell, stopped: Stop) -> None:
        if cell.cell_type == "code":
            shown = f"\x1b[31m{stopped.ename}\x1b[39m: {stopped}"
            cell.outputs.append(
                nbformat.v4.new_output(
                    "error", ename=stopped.ename, evalue=str(stopped), traceback=[shown]
                )
            )

    def _fail_before_cells(self, stopped: Stop) -> None:
        """Nothing ran yet: the first code cell carries the reason, and counts as the failed one."""
        for index, cell in enumerate(self.nb.cells):
            if cell.cell_type == "code":
                self._mark(cell, stopped)
                self.nb_man.cell_exception(cell, cell_index=index)
                return

    async def _end_kernel(self) -> None:
        # Before the shutdown, which reaps the kernel: as long as it is there it leads to children
        # that dropped the environment, and its number is nobody else's.
        process = self._process()
        roots = {process.pid} if process is not None and process.returncode is None else set()
        left = await asyncio.to_thread(family.end_family, self.cookie, roots)
        if left:
            self.log.error(f"{len(left)} processes of the notebook could not be killed")
        with contextlib.suppress(Exception):
            if self.km is not None and self.km.has_kernel:
                await ensure_async(self.km.shutdown_kernel(now=True))
        with contextlib.suppress(Exception):
            if self.km is not None:
                await ensure_async(self.km.cleanup_resources())
        if self.kc is not None:
            with contextlib.suppress(Exception):
                await ensure_async(self.kc.stop_channels())
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _save_now_and_then(self) -> None:
        """Also without a message: a silent hang must not lose the lines printed before it."""
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
