"""papermill's view of a notebook while it runs, made to hide no failure."""

from papermill.engines import NotebookExecutionManager

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
