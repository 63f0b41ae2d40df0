"""Where the default socket lies, and which folders are trusted."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from mstar.config.paths import UntrustedFolder, check_private, default_log, default_socket


def test_the_runtime_directory_is_taken_where_it_is_ours(tmp_path: Path) -> None:
    assert default_socket({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "mstar/mstar.sock"


@pytest.mark.parametrize("runtime", ["", "relative", "/none/such"])
def test_without_one_the_socket_lies_in_the_users_folder(runtime: str) -> None:
    expected = Path(tempfile.gettempdir(), f"mstar-{os.geteuid()}", "mstar.sock")
    assert default_socket({"XDG_RUNTIME_DIR": runtime}) == expected


def test_a_runtime_directory_of_somebody_else_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert default_socket({"XDG_RUNTIME_DIR": str(tmp_path)}).parent.name == "mstar-4242"


def test_a_folder_of_ours_is_trusted_a_link_an_open_or_a_foreign_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir(mode=0o700)
    link.symlink_to(folder)
    check_private(folder)
    with pytest.raises(UntrustedFolder, match="not a real directory"):
        check_private(link)
    folder.chmod(0o770)
    with pytest.raises(UntrustedFolder, match="mode 0770"):
        check_private(folder)
    folder.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(UntrustedFolder, match="not to 4242"):
        check_private(folder)


def test_the_log_lies_in_the_state_directory() -> None:
    assert default_log({"XDG_STATE_HOME": "/state"}) == Path("/state/mstar/mstar.log")
    assert default_log({}) == Path.home() / ".local/state/mstar/mstar.log"
