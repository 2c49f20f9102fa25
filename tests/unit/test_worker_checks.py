"""Which file system a store is on, from a table of mounts."""

from __future__ import annotations

import pytest

from celery_wheel.worker.checks import network_file_system


@pytest.fixture
def mounts(tmp_path):
    """A table of mounts with two network drives, one within the other's path."""
    table = tmp_path / "mounts"
    table.write_text(
        "rootfs / ext4 rw 0 0\n"
        f"server:/data {tmp_path}/net nfs4 rw 0 0\n"
        f"tmpfs {tmp_path}/net/local tmpfs rw 0 0\n"
        f"//server/share {tmp_path}/with\\040space cifs rw 0 0\n"
        "broken\n"
    )
    for name in ("net/local", "net/deep", "netherlands", "with space"):
        (tmp_path / name).mkdir(parents=True)
    return str(table)


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("wheel.db", None),
        ("net/wheel.db", "nfs4"),
        ("net/deep/wheel.db", "nfs4"),
        ("net/local/wheel.db", None),
        ("netherlands/wheel.db", None),
        ("with space/wheel.db", "cifs"),
    ],
)
def test_the_innermost_mount_decides(tmp_path, mounts, where, kind):
    """A path is on the mount with the longest name that holds it, by whole components."""
    assert network_file_system(tmp_path / where, mounts) == kind


def test_a_link_to_a_network_drive(tmp_path, mounts):
    """What counts is where the file really is."""
    (tmp_path / "link").symlink_to(tmp_path / "net")
    assert network_file_system(tmp_path / "link" / "wheel.db", mounts) == "nfs4"


def test_where_the_system_does_not_tell(tmp_path):
    """Without a table of mounts nothing is claimed."""
    assert network_file_system(tmp_path / "wheel.db", str(tmp_path / "no such file")) is None
