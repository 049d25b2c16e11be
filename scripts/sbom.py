#!/usr/bin/env python3
"""Prints a list of the program's dependencies, in CycloneDX 1.5: scripts/sbom.py [LICENCES]

With LICENCES, writes the licences of all crates in the program to this file. Crates that are only used to compile the
program have the scope "excluded". The list comes from `cargo tree`, because `cargo metadata` also contains optional
crates that are never compiled, such as a second crypto library. TARGET is the target, by default this machine's.
"""

import collections
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tomllib

PACKAGE = "tunnel"
LICENCES = """\
The program contains these crates. It also contains Rust's standard library (Apache-2.0 OR MIT) and, on Linux, the GNU C
library (LGPL-2.1-or-later), as the program is linked with it statically. Each text below names the crates that come with
it.

{}
"""


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def tree(target, edges):
    """Returns name and version of the program and its dependencies."""
    lines = output(
        *("cargo", "tree", "--locked", "--package", PACKAGE, "--target", target, "--edges", edges),
        *("--prefix", "none", "--format", "{p}"),
    )
    return {(name, version.removeprefix("v")) for name, version, *_ in map(str.split, filter(None, lines.split("\n")))}


def texts_of(package):
    """Returns the licence files of a crate, also those of C code in it."""
    root = pathlib.Path(package["manifest_path"]).parent
    starts = "LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"
    files = (file for file in sorted(root.rglob("*")) if file.name.upper().startswith(starts) and file.is_file())
    return [file.read_text(errors="replace").strip() for file in files if file.suffix.lower() in ("", ".md", ".txt")]


def licences(packages):
    """Returns a list of these crates, and all texts of their licences."""
    found, crates = {package["id"]: texts_of(package) for package in packages}, collections.defaultdict(list)
    for package in packages:
        near = [found[other["id"]] for other in packages if other["repository"] == package["repository"]]
        if package["license"] == "Apache-2.0":
            near.append([pathlib.Path("LICENSE").read_text().strip()])
        name = "{name} {version}".format(**package)
        texts = found[package["id"]] or next(filter(None, near), None) or sys.exit(f"{name} has no licence text")
        for text in texts:
            crates[text].append(name)
    rows = "\n".join("{name} {version}: {license}, {repository}".format(**package) for package in packages)
    parts = ("{}\n\n{}".format(", ".join(dict.fromkeys(names)), text) for text, names in crates.items())
    return LICENCES.format(f"\n\n{'=' * 120}\n\n".join([rows, *parts]))


def main():
    rustc = output("rustc", "-vV").splitlines()
    host = next(line.removeprefix("host: ") for line in rustc if line.startswith("host: "))
    target = os.environ.get("TARGET", host)
    linked = tree(target, "normal,no-proc-macro")
    graph = json.loads(output("cargo", "metadata", "--locked", "--format-version=1", "--filter-platform", target))
    packages = sorted(graph["packages"], key=lambda p: (p["name"], p["version"]))
    for file in sys.argv[1:]:
        others = (package for package in packages if package["source"])
        contained = [package for package in others if (package["name"], package["version"]) in linked]
        pathlib.Path(file).write_text(licences(contained))
    compiled = tree(target, "normal,build")
    with open("Cargo.lock", "rb") as lock:
        hashes = {(p["name"], p["version"]): p.get("checksum") for p in tomllib.load(lock)["package"]}

    refs, components = {}, []
    for package in packages:
        name = package["name"], package["version"]
        if name not in compiled:
            continue
        refs[package["id"]] = purl = "pkg:cargo/{}@{}".format(*name)
        component = {"type": "library", "bom-ref": purl, "name": name[0], "version": name[1], "purl": purl}
        component["scope"] = "required" if name in linked else "excluded"
        component["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
        if hashes[name]:
            component["hashes"] = [{"alg": "SHA-256", "content": hashes[name]}]
        components.append(component)
    program = next(c for c in components if c["name"] == PACKAGE)
    components.remove(program)
    seconds = int(os.environ["SOURCE_DATE_EPOCH"])
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(),
            "component": program | {"type": "application"},
            "properties": [{"name": "cdx:rustc:sbom:target:triple", "value": target}],
        },
        "components": components,
        "dependencies": [
            {
                "ref": refs[node["id"]],
                "dependsOn": sorted(
                    refs[dep["pkg"]]
                    for dep in node["deps"]
                    if dep["pkg"] in refs and any(kind["kind"] != "dev" for kind in dep["dep_kinds"])
                ),
            }
            for node in graph["resolve"]["nodes"]
            if node["id"] in refs
        ],
    }
    print(json.dumps(bom, indent=1))


main()
