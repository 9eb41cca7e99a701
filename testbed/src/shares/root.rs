//! The root of the guest: servers and clients of NFS and SMB as the distribution has them, with all they need, on a
//! disk image.
//!
//! Knows names of packages and nothing of what is tested.

use crate::guest::distribution::Root;

/// 150 MB of it are used.
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
