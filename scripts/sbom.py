#!/usr/bin/env python3
"""Prints a list of the program's dependencies on this machine's target, in CycloneDX 1.5.

Crates that are only used to compile the program have the scope "excluded". The list comes from `cargo tree`, because
`cargo metadata` also contains optional crates that are never compiled, such as a second crypto library.
"""

import datetime
import json
import os
import subprocess
import tomllib

PACKAGE = "tunnel"


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def tree(target, edges):
    """Returns name and version of the program and its dependencies."""
    lines = output(
        *("cargo", "tree", "--locked", "--package", PACKAGE, "--target", target, "--edges", edges),
        *("--prefix", "none", "--format", "{p}"),
    )
    return {(name, version.removeprefix("v")) for name, version, *_ in map(str.split, filter(None, lines.split("\n")))}


def main():
    rustc = output("rustc", "-vV").splitlines()
    target = next(line.removeprefix("host: ") for line in rustc if line.startswith("host: "))
    compiled = tree(target, "normal,build")
    linked = tree(target, "normal,no-proc-macro")
    graph = json.loads(output("cargo", "metadata", "--locked", "--format-version=1", "--filter-platform", target))
    with open("Cargo.lock", "rb") as lock:
        hashes = {(p["name"], p["version"]): p.get("checksum") for p in tomllib.load(lock)["package"]}

    refs, components = {}, []
    for package in sorted(graph["packages"], key=lambda p: (p["name"], p["version"])):
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
