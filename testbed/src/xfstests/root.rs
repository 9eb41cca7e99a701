//! The root file system of the guest for xfstests: the distribution's programs that its scripts use.
//!
//! It lists packages and users, and knows nothing about the tests.

use crate::guest::distribution::Root;

/// Packages for building a checkout are not included: it is built on the host, with the same distribution.
pub const ROOT: Root<'static> = Root {
    about: "what xfstests calls (60 MB)",
    packages: &[
        "acl",
        "attr",
        "bash",
        "bc",
        "bsdutils",
        "bsdextrautils",
        "coreutils",
        "diffutils",
        "dmsetup",
        "e2fsprogs",
        "file",
        "findutils",
        "fio",
        "gawk",
        "grep",
        "hostname",
        "indent",
        "iproute2",
        "keyutils",
        "kmod",
        "libacl1",
        "libaio1",
        "libc-bin",
        "libcap2-bin",
        "libgdbm6",
        "libpam-modules",
        "liburing2",
        "libuuid1",
        "mount",
        "ncurses-bin",
        "perl",
        "procps",
        "psmisc",
        "quota",
        "sed",
        "tar",
        "util-linux",
        "util-linux-extra",
        "uuid-runtime",
        "xfsdump",
        "xfsprogs",
    ],
    also: &["perl", "libperl", "tar_", "passwd"],
    files: &[
        ("etc/group", GROUPS),
        ("etc/pam.d/other", PAM),
        ("etc/pam.d/su", PAM),
        ("etc/pam.d/su-l", PAM),
        ("etc/passwd", USERS),
        ("etc/shadow", "root:*:1::::::\n"),
        ("sbin/xfstests-init", include_str!("../../xfstests/init")),
    ],
    mib: 900,
};

/// The users as which tests run (xfstests, README).
const USERS: &str = "\
root:x:0:0:root:/root:/bin/bash
daemon:x:1:1:daemon:/:/bin/bash
bin:x:2:2:bin:/:/bin/bash
fsgqa:x:1001:1001::/tmp:/bin/bash
fsgqa2:x:1002:1002::/tmp:/bin/bash
123456-fsgqa:x:1003:1003::/tmp:/bin/bash
nobody:x:65534:65534::/:/bin/sh
";

/// Allows root to become any of them with `su`.
const PAM: &str = "\
auth sufficient pam_rootok.so
auth required pam_permit.so
account required pam_permit.so
session required pam_permit.so
";

const GROUPS: &str = "\
root:x:0:
daemon:x:1:
bin:x:2:
sys:x:3:
fsgqa:x:1001:
fsgqa2:x:1002:
123456-fsgqa:x:1003:
nogroup:x:65534:
";
