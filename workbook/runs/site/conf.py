"""Sphinx's configuration of the site: no page requests anything from another host."""

import gc
import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml

from workbook.runs.report import closed

# jsonschema would compile 38 grammars for addresses in notebooks, which takes over a second.
sys.modules.setdefault("rfc3987_syntax", None)
# At Python's thresholds a tenth of Sphinx's time is garbage collection, which finds little.
gc.set_threshold(20_000, 20, 20)

project = html_title = "NSA workbook"
author = ""
extensions = ["myst_nb"]
html_theme = "sphinx_book_theme"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_copyright = html_show_sphinx = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "use_download_button": False,
    "home_page_in_toc": True,
    "show_toc_level": 2,
    "footer_content_items": [],
    "navbar_persistent": [],
}
nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js: dict[str, dict] = {}  # widgets would be loaded from another host
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
# Notebooks are arbitrary: their headings may begin at any level, and their links lead anywhere.
suppress_warnings = ["myst.header", "myst.xref_missing", "mystnb", "image", "toc.not_included"]
suppress_warnings += ["misc.highlighting_failure"]

POLICY = "default-src 'self' file: data: blob: 'unsafe-inline'"
SCRIPTS = {"compare": ["compare.js"], "explorer": ["explorer-data.js", "explorer.js"]}
ACTIVE = re.compile(
    r"<(script|iframe|object|embed|link|base|meta)\b|\ssrc(set)?\s*=|\son\w+\s*=", re.I
)


def setup(app) -> dict:
    app.connect("builder-inited", keep_inside, priority=900)  # after myst-nb's own
    app.connect("doctree-read", close, priority=1)
    app.connect("doctree-resolved", unlink)
    app.connect("html-page-context", page)
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def keep_inside(app) -> None:
    """Keep pictures in the site's folder; myst-nb would write them beside it."""
    inside = str(Path(app.srcdir).parent / "pictures")
    app.env.mystnb_config = app.env.mystnb_config.copy(output_folder=inside)


def close(app, doctree) -> None:
    """Turn pictures of other hosts into text; remove scripts, frames and handlers of a notebook."""
    for image in list(doctree.findall(nodes.image)):
        if re.match(r"\s*(https?:)?//", image.get("uri", "")):
            address = re.sub(r"^\s*(https?:)?//", "", image["uri"])
            image.replace_self(nodes.Text(f"[picture left out: {address}]"))
    for raw in list(doctree.findall(nodes.raw)):
        if "html" in raw.get("format", "") and ACTIVE.search(raw.astext()):
            html = closed(raw.astext(), Path(app.srcdir))
            raw.replace_self(nodes.raw("", html, format="html"))


def unlink(app, doctree, name) -> None:
    """Turn links to files that the site does not have into text."""
    for link in list(doctree.findall(nodes.reference)):
        if re.match(r"#?[^#:]*\.(md|ipynb|py)\b", link.get("refuri", "")):
            link.replace_self(link.children)


def page(app, pagename, templatename, context, doctree) -> None:
    """Add the content policy to each page, which browsers enforce whatever a notebook contains."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    context["metatags"] = policy + context.get("metatags", "")
    if pagename.startswith("runs/"):  # runs of one notebook have one heading
        _, day, name = pagename.split("/")
        notebook, _, id = name.partition("-")
        context["title"] = f"{notebook}, {day}, {id}: {context.get('title', '')}"
    for script in SCRIPTS.get(pagename, ()):
        app.add_js_file(script)


def inline_math(translator, node) -> None:
    translator.body.append(mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def block_math(translator, node) -> None:
    translator.body.append(f'<div class="math">{mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def mathml(tex: str, as_block: bool) -> str:
    """MathML, which browsers render themselves; the source if it cannot be made."""
    try:
        return latex2mathml.tex2mathml(tex, as_block=as_block)
    except MathError:
        return f"<code>{nodes.Text(tex).astext().replace('&', '&amp;').replace('<', '&lt;')}</code>"
