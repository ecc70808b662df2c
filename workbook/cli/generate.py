"""`nsa generate`: continue a text with a trained model, using a cache."""

import codecs
import sys
from typing import TYPE_CHECKING

from workbook.cli import options
from workbook.cli.options import GOOD, SEVERAL, command, share

if TYPE_CHECKING:
    from nsa.model.generate import Generation
    from nsa.model.llama import LanguageModel

BYTES = 256  # vocabulary size at which tokens are bytes of text


def add(commands) -> None:
    """Add the parser."""
    made = command(commands, generate)
    option = made.add_argument
    text = "a run of nsa train (id or latest), a folder of checkpoints, or a file"
    option("--checkpoint", required=True, metavar="RUN", help=text)
    text = "the text to go on with, - for standard input; several are one batch"
    option("--prompt", metavar="TEXT", help=text, **SEVERAL)
    text = "prompts and tokens are ids, as 0,17,3: for a vocabulary that is not bytes"
    option("--ids", action="store_true", help=text)
    option("--tokens", type=int, default=200, metavar="N", help="how many more; 200 by default")
    text = "0, the default, takes the most likely token; 1 draws as the model says"
    option("--temperature", type=float, default=0.0, metavar="X", help=text)
    option("--top-k", type=int, metavar="K", help="draw from the K most likely tokens")
    text = "draw from the fewest tokens whose probability reaches P"
    option("--top-p", type=float, metavar="P", help=text)
    option("--seed", type=int, default=1337, help="of what is drawn")
    option("--end", type=int, metavar="ID", help="end at this id, 10 for a line's end")
    share(made, "--device")
    option("--precision", choices=("fp32", "bf16", "fp16"), help="bf16 on a GPU, fp32 without")
    text = "who decodes: auto (default), triton, gather, masked or reference"
    option("--backend", default="auto", metavar="NAME", help=text)
    option("--page", type=int, metavar="TOKENS", help="a paged cache, of pages of so many tokens")
    option("--chunk", type=int, metavar="TOKENS", help="read the prompt in pieces of so many")
    text = "launch every kernel of a step instead of replaying a CUDA graph"
    option("--no-cuda-graph", action="store_true", help=text)
    text = "write sizes, times, tokens read by each branch and the cache's bytes there, as JSON"
    option("--record", metavar="FILE", help=text)
    share(made, "--runs")


def generate(arguments) -> int:
    """Continue a prompt, token by token: nsa generate --checkpoint RUN --prompt "def " --tokens
    200. A single text is streamed; the time to the first token and tokens/s follow on stderr.
    """
    options.check_json(arguments.record)
    if not arguments.prompt:
        raise ValueError('--prompt is missing: --prompt "def ", or --prompt - for standard input')
    if arguments.prompt.count("-") > 1:
        raise ValueError("--prompt - is given twice, and standard input can be read once")
    model = _model(arguments)
    prompts = [_ids(text, arguments.ids, model.config.vocab) for text in arguments.prompt]

    from nsa.model import generate as generation

    names = ("tokens", "temperature", "top_k", "top_p", "seed", "end", "chunk", "backend", "page")
    given = {name: getattr(arguments, name) for name in names}
    graph = False if arguments.no_cuda_graph else None
    made = generation.generate(model, prompts, **given, cuda_graph=graph)
    if len(prompts) == 1:
        _stream(made, arguments.ids)
    else:
        for number, tokens in enumerate(made.all()):
            ids = " ".join(map(str, tokens))
            print(f"--- {number}")
            print(ids if arguments.ids else bytes(tokens).decode("utf-8", "replace"))
    _tell(made)
    if arguments.record:
        from workbook.runs.files import write_json

        facts = {"checkpoint": arguments.checkpoint, "model": model.config.to_dict()}
        write_json(arguments.record, options.provenance() | facts | made.record())
    return GOOD


def _model(arguments) -> "LanguageModel":
    import torch

    from nsa.model.saving import load_model

    gpu = options.has_gpu(arguments.device, "would do")
    place = options.place_of("--checkpoint", arguments.checkpoint, arguments.runs)
    try:
        # The backend of the training may need another device; "auto" picks one available here.
        model = load_model(place, "cuda" if gpu else "cpu", backend="auto")
    except FileNotFoundError as error:
        raise ValueError(f"--checkpoint {arguments.checkpoint}: {error}") from None
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return model.to(dtypes[arguments.precision or ("bf16" if gpu else "fp32")])


def _ids(text: str, given_as_ids: bool, vocab: int) -> list[int]:
    """Token ids of a prompt. ValueError for an empty text, or if the vocabulary is not bytes."""
    if text == "-":
        read = sys.stdin.buffer.read()
        text = read.decode() if given_as_ids else text
    else:
        read = text.encode("utf-8", "surrogateescape")
    if given_as_ids:
        try:
            return [int(word) for word in text.replace(",", " ").split()]
        except ValueError:
            raise ValueError(f"--prompt {text!r} with --ids: wanted is as 0,17,3") from None
    if vocab != BYTES:
        raise ValueError(
            f"the model's vocabulary has {vocab} ids and not the {BYTES} bytes of a text; --ids "
            "--prompt 0,17,3 would do"
        )
    if not read:
        raise ValueError("--prompt is empty; at least one byte would do, as a line's end")
    return list(read)


def _stream(made: "Generation", as_ids: bool) -> None:
    """Print each token as it arrives, and the bytes of one character together."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for (token,) in made:
        shown = f"{token} " if as_ids else decoder.decode(bytes([token]))
        print(shown, end="", flush=True)
    print(decoder.decode(b"", final=True), flush=True)


def _tell(made: "Generation") -> None:
    record = made.record()
    cache, count = record["cache"], sum(record["new_tokens"])
    read = ", ".join(f"{n} {name}" for name, n in cache["last_step"].items())
    said = (
        f"{count} tokens, the first after {record['first_token_ms']:.1f} ms, then "
        f"{record['tokens_per_s']:.1f} tokens/s on {record['device']}",
        f"cache {cache['bytes'] / 2**20:.2f} MiB; keys read in the last step a layer: {read}",
    )
    for line in said:
        print(f"nsa: {line}", file=sys.stderr)
