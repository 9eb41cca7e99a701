//! The root file system of the guest: the distribution's servers and clients of NFS and SMB, on a disk image.
//!
//! It lists packages and knows nothing about the tests.

use crate::guest::distribution::Root;

/// The root file system, of which 150 MB are used.
pub const ROOT: Root<'static> = Root {
    about: "servers and clients of NFS and SMB (75 MB)",
    packages: &[
        "bash",
        "busybox-static",
        "cifs-utils",
        "coreutils",
        "dmsetup",
        "e2fsprogs",
        "grep",
        "iproute2",
        "jq",
        "libgcc-s1",
        "mount",
        "nfs-common",
        "nfs-kernel-server",
        "procps",
        "qemu-utils",
        "samba",
        "samba-common-bin",
        "sed",
        "util-linux",
    ],
    also: &[],
    files: &[
        ("etc/group", "root:x:0:\nnogroup:x:65534:\n"),
        ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n"),
        ("sbin/shares-init", include_str!("../../shares/init")),
    ],
    mib: 400,
};
