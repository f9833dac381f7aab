#!/usr/bin/env python3
"""Prints known vulnerabilities of the versions in constraints.txt, asked of OSV (osv.dev) in one request.

It reports and never fails: a new advisory must not break an unrelated change.
"""

import json
import re
import urllib.request
from pathlib import Path

OSV = "https://api.osv.dev/v1/querybatch"
LOCK = Path(__file__).resolve().parent.parent / "constraints.txt"


def audit(lock: str, url: str = OSV) -> list[str]:
    """Reports on the locked versions: a line for each with advisories, or one line if there are none."""
    locked = re.findall(r"^([\w.-]+)==([^ ;\n]+)", lock, re.MULTILINE)
    asked = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in locked]
    request = urllib.request.Request(url, json.dumps({"queries": asked}).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            results = json.load(answer)["results"]
        found = [
            f"{name} {version}: {', '.join(each['id'] for each in result['vulns'])}"
            for (name, version), result in zip(locked, results, strict=True)
            if result.get("vulns")
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"dependencies not audited: {url} cannot be reached ({type(error).__name__})"]
    return found or [f"no known vulnerability in {len(locked)} locked versions"]


if __name__ == "__main__":
    print("\n".join(audit(LOCK.read_text(encoding="utf-8"))))
