#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""site.py BUILD FOLDER: the documentation as a static site in FOLDER/site, by mkdocs; every link of it is checked.

The site has README, docs/, the examples and the manual pages of BUILD (mandoc makes HTML of them), and the files of the
source tree that pages refer to. It needs no network and no server: open FOLDER/site/index.html. The theme is the one
beside this file: those of Debian 12's mkdocs ask for scripts that the package does not have.
"""
import glob
import html.parser
import os
import re
import shutil
import subprocess
import sys
import urllib.parse

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")

# Pages by what a reader wants; those that no line names are found in docs/ and come last.
GUIDES = ["first_c", "first_python", "two_machines", "launchers", "roce", "efa", "tuning_sms", "report", "hang"]
USE = ["run", "bench", "doctor", "top", "trace", "environment", "python", "frameworks", "nccl_ep", "nccl_programs",
       "nccl_rules", "security", "packages"]
CONFIG = """site_name: EPX
docs_dir: tree
site_dir: site
use_directory_urls: false
theme:
  name: null
  custom_dir: {theme}
markdown_extensions: [tables, fenced_code, toc]
plugins: []
nav:
"""


def copy(name, tree):
    """A file; of a folder, a list of what is in it."""
    source, target = os.path.join(ROOT, name), os.path.join(tree, name)
    if os.path.isdir(source):
        for inside in os.listdir(source):
            if os.path.isfile(os.path.join(source, inside)):
                copy(os.path.join(name, inside), tree)
        with open(os.path.join(target, "index.md"), "w", encoding="utf-8") as page:
            page.write(f"# {name}\n\n" + "".join(f"- [{inside}]({inside})\n" for inside in sorted(os.listdir(target))
                                                 if inside != "index.md"))
    if not os.path.isfile(source):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copyfile(source, target)


def copy_pages(tree):
    """Pages keep their places in the tree, so that links between them do. Files that they link to come along."""
    names = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "examples/README.md"]
    names += [os.path.relpath(path, ROOT) for path in glob.glob(os.path.join(ROOT, "docs", "**", "*"), recursive=True)
              if os.path.isfile(path)]
    for name in names:
        copy(name, tree)
        if not name.endswith(".md"):
            continue
        with open(os.path.join(ROOT, name), encoding="utf-8") as page:
            for target in LINK.findall(page.read()):
                if not re.match(r"[a-z]+:", target):
                    copy(os.path.normpath(os.path.join(os.path.dirname(name), target)), tree)


def fix_page(path):
    """What GitHub's Markdown has and Python's has not: words behind the language of a block, lists without a blank
    line before them, and blocks that follow a paragraph at once."""
    with open(path, encoding="utf-8") as page:
        # mkdocs leaves files out whose names begin with a dot.
        lines = re.sub(r"\[([^]]*)\]\((?:[^)\s]*/)?\.\w[^)\s/]*\)", r"\1", page.read()).split("\n")
    out, inside = [], False
    for line in lines:
        fence = line.startswith("```")
        if fence and not inside:
            line = "```" + (line[3:].split() or [""])[0]
        blank = out and out[-1].strip()
        item = re.match(r" ?([-*]|\d+\.) ", line)
        if not inside and blank and (fence or (item and not re.match(r" *([-*]|\d+\.) |  ", out[-1]))
                                     or (line.startswith("|") and not out[-1].startswith("|"))):
            out.append("")
        inside = inside != fence
        out.append(line)
    with open(path, "w", encoding="utf-8") as page:
        page.write("\n".join(out))


def make_manual(build, tree):
    """Manual pages as HTML in a page each; names of functions lead to their family's."""
    pages = sorted(glob.glob(os.path.join(build, "man", "man?", "*.?")))
    if not pages:
        sys.exit(f"site: no manual pages in {build}/man")
    os.makedirs(os.path.join(tree, "man"))
    listed = {}
    for path in pages:
        name = os.path.basename(path)
        text = subprocess.run(["mandoc", "-T", "html", "-O", "fragment,man=%N.%S.html", path], check=True,
                              capture_output=True, text=True, cwd=os.path.join(build, "man")).stdout
        with open(os.path.join(tree, "man", name + ".md"), "w", encoding="utf-8") as page:
            # mandoc 1.14 breaks the lines of a block twice.
            text = re.sub(r"<pre>.*?</pre>", lambda block: block[0].replace("<br/>\n", ""), text, flags=re.S)
            page.write(f"# {name.replace('_', chr(92) + '_')}\n\n" + text)
        with open(path, encoding="utf-8") as source:
            if not source.read().startswith(".so "):
                listed.setdefault(name[-1], []).append(name)
    with open(os.path.join(tree, "man", "index.md"), "w", encoding="utf-8") as page:
        page.write("# Manual pages\n\n")
        for section, title in (("1", "Programs"), ("3", "Functions, by family"), ("7", "Rules and variables")):
            page.write(f"## {title}\n\n" + "".join(f"- [{name}]({name}.md)\n" for name in listed[section]) + "\n")


def entries(tree, folder, names):
    for name in names:
        if os.path.exists(os.path.join(tree, folder, name + ".md")):
            yield f"{folder}/{name}.md"


def write_config(folder, tree):
    others = sorted(name[:-3] for name in os.listdir(os.path.join(tree, "docs")) if name.endswith(".md"))
    inside = [name for name in others if name not in USE]
    notes = sorted(os.path.relpath(path, tree) for path in glob.glob(os.path.join(tree, "docs", "notes", "*.md")))
    parts = {"Guides": entries(tree, "docs/guides", GUIDES), "Use": entries(tree, "docs", USE),
             "How it works": entries(tree, "docs", inside)}
    with open(os.path.join(folder, "mkdocs.yml"), "w", encoding="utf-8") as config:
        config.write(CONFIG.format(theme=os.path.join(ROOT, "scripts", "docs", "theme")) + "  - Home: README.md\n")
        for title, pages in parts.items():
            config.write(f"  - {title}:\n" + "".join(f"      - {page}\n" for page in pages))
        config.write("  - Examples: examples/README.md\n  - Manual pages: man/index.md\n")
        config.write("  - Project:\n      - CONTRIBUTING.md\n      - CHANGELOG.md\n")
        config.write("".join(f"      - {page}\n" for page in notes))


def break_names(site):
    """Names in tables, but for their first column, may be broken behind an underscore or a slash, and only there."""
    for path in glob.glob(os.path.join(site, "**", "*.html"), recursive=True):
        with open(path, encoding="utf-8") as page:
            text = page.read()
        whole = re.sub(r"(?<!<tr>\n)<td>.*?</td>", lambda cell: re.sub(
            r"(?<=<code>)[^<]+", lambda name: re.sub(r"([_/])(?=\w)", r"\1<wbr>", name[0]), cell[0]), text, flags=re.S)
        if whole != text:
            with open(path, "w", encoding="utf-8") as page:
                page.write(whole)


class Page(html.parser.HTMLParser):
    """Links and anchors of a page, and what it would load from elsewhere."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors, self.loads = [], set(), []
        with open(path, encoding="utf-8") as file:
            self.feed(file.read())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs.get("id"), attrs.get("name")}
        for name in ("href", "src"):
            if attrs.get(name):
                self.links.append(attrs[name])
                if tag in ("script", "link", "img", "iframe") and re.match(r"(https?:)?//", attrs[name]):
                    self.loads.append(attrs[name])


def broken_links(site):
    pages = {path: Page(path) for path in glob.glob(os.path.join(site, "**", "*.html"), recursive=True)}
    for path, page in sorted(pages.items()):
        name = os.path.relpath(path, site)
        yield from (f"{name}: loads {load} from the network" for load in page.loads)
        for link in page.links:
            if re.match(r"[a-z]+:|//|/$", link) or name == "404.html":
                continue
            target, _, anchor = link.partition("#")
            target = os.path.normpath(os.path.join(os.path.dirname(path), urllib.parse.unquote(target.split("?")[0])
                                                   or os.path.basename(path)))
            target = os.path.join(target, "index.html") if os.path.isdir(target) else target
            if not os.path.exists(target):
                yield f"{name}: link to {link}: no such file"
            elif anchor and target in pages and urllib.parse.unquote(anchor) not in pages[target].anchors:
                yield f"{name}: link to {link}: no such place"


def main():
    build, folder = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
    tree, site = os.path.join(folder, "tree"), os.path.join(folder, "site")
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(tree)
    copy_pages(tree)
    for path in glob.glob(os.path.join(tree, "**", "*.md"), recursive=True):
        fix_page(path)
    make_manual(build, tree)
    write_config(folder, tree)
    subprocess.run(["mkdocs", "build", "--quiet", "--strict"], check=True, cwd=folder)
    break_names(site)
    broken = sorted(set(broken_links(site)))
    for fault in broken:
        print(fault)
    count = len(glob.glob(os.path.join(site, "**", "*.html"), recursive=True))
    print(f"{count} pages in {os.path.relpath(site)}, {len(broken)} broken links")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
