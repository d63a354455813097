"""What values of settings may be, and how they are read. Pure. No message repeats text, which may be a secret."""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    ByteSize,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

_byte_size = TypeAdapter(ByteSize)


def _size_in_bytes(value: Any, whole_number: ValidatorFunctionWrapHandler) -> Any:
    """Only text that is no whole number is read as a size, so that numbers keep their bounds and their messages."""
    try:
        return whole_number(value)
    except ValidationError as error:
        if error.errors(include_url=False)[0]["type"] != "int_parsing":
            raise
    return whole_number(read_size(str(value)))


def read_size(text: str) -> int:
    """Bytes of `64GiB` (2**30 each) or `512 MB` (10**6 each). Raises ValueError, for a number without a unit too.

    pydantic's ByteSize overlooks what follows a size ("1,000 MiB" is 1 byte to it), so the whole text must be one.
    """
    whole = ByteSize.byte_string_re.fullmatch(text.strip())
    try:
        if whole is not None and whole[2] is not None:
            return int(_byte_size.validate_python(text))
    except (ValidationError, OverflowError):
        pass
    raise PydanticCustomError("byte_size", "input should be a size such as 64GiB or 512 MB, or a number of bytes")


# The largest values are what clocks, sockets and memory maps can be told.
Positive = Annotated[float, Field(gt=0, le=1e9)]
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Timeout = Annotated[float, Field(gt=0, le=1e6)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(gt=0, le=2**31 - 1)]
Bytes = Annotated[int, Field(gt=0, le=2**63 - 1), WrapValidator(_size_in_bytes)]
MapBytes = Annotated[int, Field(ge=64 << 10, le=64 << 40), WrapValidator(_size_in_bytes)]
AbsolutePath = Annotated[Path, AfterValidator(Path.absolute)]
"""A relative one begins in the folder of who reads the settings, then: an engine may move to another folder later."""


_ENDPOINT = re.compile(
    r"https?://(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?"
    r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*)?"
)
"""The characters of RFC 3986: the HTTP library behind obstore panics at others."""
_IN_NUMBERS = re.compile(r"(?:.*\.)?[0-9]+")


def without_line_break(text: str) -> str:
    """`text` without one line break at its end, which mounted secrets, `echo` and YAML's `|` leave there."""
    return text.removesuffix("\n").removesuffix("\r")


def has_control_characters(text: str) -> bool:
    """No header of a request can carry them."""
    return any(unicodedata.category(char) == "Cc" for char in text)


def _one_line(text: str) -> str:
    text = without_line_break(text)
    if has_control_characters(text):
        raise PydanticCustomError("one_line", "must hold no control characters, such as a line break")
    return text


def _one_secret_line(secret: SecretStr) -> SecretStr:
    return SecretStr(_one_line(secret.get_secret_value()))


def why_bad_endpoint(url: str) -> str | None:
    """Why `url` cannot be the URL of an object store, or None when it can."""
    if not url.startswith(("http://", "https://")):
        return "must begin with http:// or https://"
    found = _ENDPOINT.fullmatch(url)
    if found is None:
        return "must be a URL such as https://host:9000, without user, password, query or fragment"
    if not 0 < int(found["port"] or 1) < 65536:
        return "must have a port from 1 to 65535"
    try:
        if found["v6"]:
            ipaddress.IPv6Address(found["v6"])
        elif _IN_NUMBERS.fullmatch(found["host"]):
            ipaddress.IPv4Address(found["host"])
    except ValueError:
        return "must name a host, or an IP address that is one"
    return None


def _good_endpoint(url: str) -> str:
    if url and (reason := why_bad_endpoint(url)):  # templates render "unset" as empty text
        raise PydanticCustomError("endpoint", "{reason}", {"reason": reason})
    return url


Line = Annotated[str, AfterValidator(_one_line)]
Secret = Annotated[SecretStr, AfterValidator(_one_secret_line)]
Endpoint = Annotated[Line, AfterValidator(_good_endpoint)]
