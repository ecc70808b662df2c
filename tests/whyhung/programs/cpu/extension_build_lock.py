# due: STALLED:polling or HANG:polling; line: load_kernels; within: 60; set: first
# A build of a C++ extension was interrupted and left its lock file; torch waits for it
# (cpp_extension.load hangs).
import pathlib

import torch
from torch.utils import cpp_extension

SOURCE = """
#include <torch/extension.h>
torch::Tensor twice(torch::Tensor x) { return x * 2; }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("twice", &twice); }
"""


def load_kernels(folder):
    source = folder / "twice.cpp"
    source.write_text(SOURCE)
    return cpp_extension.load("twice", [str(source)], build_directory=str(folder))


def main():
    folder = pathlib.Path("build").resolve()
    folder.mkdir(exist_ok=True)
    (folder / "lock").touch()  # of the build that was interrupted
    print("fault", flush=True)
    kernels = load_kernels(folder)
    print(kernels.twice(torch.ones(3)))


if __name__ == "__main__":
    main()
