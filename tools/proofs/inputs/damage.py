"""Damage as people and machines do it: to a JSON value, to bytes, to a file as a whole."""

from __future__ import annotations

import gzip
import json
import re
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

from tools.proofs.inputs.options import BORDER, WRONG

ODD_VALUES = (
    *json.loads(
        r"""
[null, true, false, 0, 1, -1, 2, 3, 0.5, -0.5, 1e-300, 1e308, NaN, Infinity,
"", "x", "0", "1.5", "\u00e9", "\ud83d", "\u0000", "../../etc/passwd",
[], {}, [[]], [1], ["x"], [null], {"x": 1}, {"": {}}, {"x": [{"x": [1, 2]}]}]
"""
    ),
    *(2**31, 2**63, -(2**63), 10**30, "x" * 300, [0] * 3000),
)
"""Of a JSON file. DEEP and LONG stand for what json.dumps does not write."""
DEEP, LONG = "@deep@", "@long@"
_RAW = {DEEP: "[" * 20000 + "]" * 20000, LONG: "1" * 5000}
_BYTES = (
    *b'\0 \xff \xef\xbb\xbf \n \r\n { [ " , -1 nan'.split(b" "),
    *(b"", b"9" * 400, b"\xff" * 8, b"\0" * 64),
)
_TOKEN = re.compile(rb"[A-Za-z_.]+|-?[0-9]+(?:\.[0-9]+)?|[^\sA-Za-z0-9]|\s+")


def damage_json(text: str, draw: Random) -> str:
    """One to three values, keys or whole branches other than they were."""
    content = json.loads(text)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        content = _changed(content, draw)
    out = json.dumps(content)
    for mark, raw in _RAW.items():
        out = out.replace(f'"{mark}"', raw)
    if isinstance(content, dict) and content and draw.random() < 0.05:  # a key for the second time
        key, value = draw.choice([*content]), draw.choice(ODD_VALUES)
        out = f"{out[:-1]}, {json.dumps(key)}: {json.dumps(value)}}}"
    return out


def _changed(content: Any, draw: Random) -> Any:
    places = list(_places(content))
    if not places or draw.random() < 0.04:
        return deepcopy(draw.choice((*ODD_VALUES, DEEP, LONG, [content], {"x": content})))
    holder, key = draw.choice(places)
    kind = draw.random()
    if kind < 0.2:
        del holder[key]
    elif kind < 0.3 and isinstance(holder, dict):
        holder[draw.choice(("", "x", "é", f"{key}x", key.upper()))] = holder.pop(key)
    elif kind < 0.4:
        other, where = draw.choice(places)
        if isinstance(other, dict) and where not in other:
            return content
        holder[key] = deepcopy(other[where])  # else a ring may come of it
    elif kind < 0.55 and isinstance(holder[key], int | float):
        old = holder[key]
        holder[key] = draw.choice((-old, old + 1, old * 2, old * 1e9, old / 3, str(old)))
    elif kind < 0.6 and isinstance(holder, list):
        holder.insert(key, holder[key])
    else:
        holder[key] = deepcopy(draw.choice((*ODD_VALUES, DEEP, LONG)))
    return content


def _places(content: Any) -> Any:
    if isinstance(content, dict | list):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield content, key
            yield from _places(value)


def damage_text(text: bytes, draw: Random) -> bytes:
    """Words, numbers and lines of a CSV, a list or a program."""
    tokens = _TOKEN.findall(text)
    for _ in range(draw.choice((1, 1, 2, 4))):
        if not tokens:
            return b""
        i = draw.randrange(len(tokens))
        kind = draw.randrange(4)
        if kind == 0:
            word = draw.choice((*WRONG, *BORDER)).encode(errors="surrogatepass")
            tokens[i] = draw.choice((word, draw.choice(_BYTES)))
        elif kind == 1:
            del tokens[i : i + draw.choice((1, 1, 5, 50))]
        elif kind == 2:
            tokens[i:i] = tokens[draw.randrange(len(tokens)) :][: draw.choice((1, 5, 50))]
        else:
            j = draw.randrange(len(tokens))
            tokens[i], tokens[j] = tokens[j], tokens[i]
    return b"".join(tokens)


def damage_bytes(content: bytes, draw: Random) -> bytes:
    """Cut off, cut out, doubled, overwritten, a bit turned."""
    kind, at = draw.randrange(6), draw.randrange(len(content) + 1)
    if draw.random() < 0.5:
        at = min(at, draw.randrange(256))  # where headers are
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + content[at + draw.choice((1, 2, 8, 100)) :]
    if kind == 2:
        return content[:at] + draw.choice(_BYTES) + content[at:]
    if kind == 3:
        return content[:at] + content[at // 2 :]
    if kind == 4:
        new = draw.choice(_BYTES)
        return content[:at] + new + content[at + len(new) :]
    bits = bytearray(content or b"\0")
    bits[at % len(bits)] ^= 1 << draw.randrange(8)
    return bytes(bits)


def damage_safetensors(content: bytes, draw: Random) -> bytes:
    """Damage a file of safetensors, whose header is JSON after the header's length."""
    size = int.from_bytes(content[:8], "little")
    header = damage_json(content[8 : 8 + size].decode(), draw).encode(errors="surrogatepass")
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def damage_file(path: Path, draw: Random) -> str:
    """Give a file another content, or none. Returns the kind of damage, in a word."""
    if draw.random() < 0.12:
        return _whole(path, draw)
    content = path.read_bytes()
    packed, name = path.suffix == ".gz" and draw.random() < 0.7, path.name.removesuffix(".gz")
    content = gzip.decompress(content) if packed else content
    by_kind = draw.random() < 0.75
    done, new = "bytes", b""
    if by_kind and path.suffix == ".gz" and not packed:
        new = damage_bytes(content, draw)
    elif by_kind and name.endswith(".safetensors"):
        done, new = "header", damage_safetensors(content, draw)
    elif by_kind and name.endswith(".json"):
        done, new = "JSON", damage_json(content.decode(), draw).encode(errors="surrogatepass")
    elif by_kind and name.endswith(".jsonl"):
        done, lines = "JSON", content.decode().splitlines()
        i = draw.randrange(len(lines))
        lines[i] = damage_json(lines[i], draw)
        new = "\n".join(lines).encode(errors="surrogatepass")
    elif by_kind and name.endswith((".csv", ".txt")):
        done, new = "words", damage_text(content, draw)
    else:
        new = damage_bytes(content, draw)
    path.write_bytes(gzip.compress(new, 1, mtime=0) if packed else new)
    return done


def _whole(path: Path, draw: Random) -> str:
    kinds = ("removed", "emptied", "a folder", "a loop", "without permission", "/dev/null")
    kind = draw.choice(kinds)
    if kind == "without permission":
        path.chmod(0)
        return kind
    path.unlink()
    if kind == "emptied":
        path.write_bytes(b"")
    elif kind == "a folder":
        path.mkdir()
    elif kind != "removed":
        path.symlink_to(path.name if kind == "a loop" else kind)
    return kind
