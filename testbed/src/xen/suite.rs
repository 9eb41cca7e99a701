//! The tests by name: which script of `testbed/xen/tests` runs in dom0, on whose backend, and for which kind of guest.
//!
//! Knows nothing of how they run.

/// Who serves the guests' disks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Backend {
    /// The kernel's.
    Blkback,
    /// QEMU's.
    Qdisk,
    /// Ours.
    Tapline,
}

impl Backend {
    pub const ALL: [Self; 3] = [Self::Blkback, Self::Qdisk, Self::Tapline];

    pub fn name(self) -> &'static str {
        match self {
            Self::Blkback => "blkback",
            Self::Qdisk => "qdisk",
            Self::Tapline => "tapline",
        }
    }

    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|backend| backend.name() == name)
    }
}

/// What a test is about.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Subject {
    /// The tests of the crate `xen`, in dom0 itself.
    Crate,
    /// A front end of our own in dom0, which does to our backend what no guest's would.
    Hostile,
    /// A guest's disks.
    Disks(Backend, Guest),
}

/// How a guest is virtualised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Guest {
    Pv,
    Pvh,
    Hvm,
}

impl Guest {
    pub fn name(self) -> &'static str {
        match self {
            Self::Pv => "pv",
            Self::Pvh => "pvh",
            Self::Hvm => "hvm",
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Test {
    /// A script in `testbed/xen/tests`, without its `.sh`.
    pub script: &'static str,
    pub subject: Subject,
}

/// A script about disks.
struct Script {
    name: &'static str,
    /// Who can do what it asks for.
    backends: &'static [Backend],
    guests: &'static [Guest],
}

impl Script {
    const fn new(name: &'static str, backends: &'static [Backend]) -> Self {
        Self { name, backends, guests: &[Guest::Pvh] }
    }
}

const ALL: &[Backend] = &Backend::ALL;
const OURS: &[Backend] = &[Backend::Tapline];

/// The scripts, with who must pass them. A peer runs those that it can, which shows that the script is right.
const SCRIPTS: [Script; 39] = [
    Script { name: "attach", backends: ALL, guests: &[Guest::Pvh, Guest::Pv] },
    Script::new("depths", ALL),
    Script::new("plug", ALL),
    Script::new("killed", ALL),
    Script::new("many", ALL),
    // QEMU 7.2's fails on a disk that is only read: "Block node is read-only".
    Script::new("readonly", &[Backend::Blkback, Backend::Tapline]),
    Script::new("flush", ALL),
    Script::new("discard", ALL),
    // QEMU's disks have sectors of 512 bytes, and xl cannot ask it for another size of a disk or of its sectors.
    Script::new("sectors", &[Backend::Blkback, Backend::Tapline]),
    // Ours is shown to firmware by our block script: `boot`.
    Script { name: "firmware", backends: &[Backend::Blkback], guests: &[Guest::Hvm] },
    Script { name: "boot", backends: OURS, guests: &[Guest::Hvm] },
    Script { name: "emulated", backends: OURS, guests: &[Guest::Hvm] },
    Script::new("resize", &[Backend::Blkback, Backend::Tapline]),
    Script::new("qcow2", &[Backend::Qdisk, Backend::Tapline]),
    Script::new("vhd", OURS),
    Script::new("power", OURS),
    Script::new("snapshot", OURS),
    Script::new("statistics", OURS),
    Script::new("idle", OURS),
    Script::new("upgrade", OURS),
    Script::new("full", OURS),
    // The life of a disk.
    Script::new("restart", OURS),
    Script::new("late", OURS),
    Script::new("stopped", OURS),
    Script::new("vbd3", OURS),
    Script::new("store", OURS),
    Script::new("unplug", OURS),
    Script { name: "script", backends: OURS, guests: &[Guest::Pvh, Guest::Pv] },
    Script::new("reboot", OURS),
    Script::new("reconnect", OURS),
    Script::new("destroyed", OURS),
    Script::new("driver", OURS),
    Script::new("refused", OURS),
    Script { name: "save", backends: OURS, guests: &[Guest::Pvh, Guest::Pv] },
    // Disks and guests by the daemon.
    Script { name: "daemon", backends: OURS, guests: &[Guest::Pvh, Guest::Pv] },
    Script::new("kexec", OURS),
    Script { name: "pygrub", backends: OURS, guests: &[Guest::Pvh, Guest::Pv] },
    Script::new("daemon-ends", OURS),
    Script::new("daemon-save", OURS),
];

/// Scripts with a front end of our own.
const HOSTILE: [&str; 5] = ["hostile-requests", "hostile-handshake", "hostile-pressure", "cycles", "deaths"];

impl Test {
    /// The tests of `backends`, after those that need none.
    pub fn all(backends: &[Backend]) -> Vec<Self> {
        let mut tests = vec![Self { script: "crate", subject: Subject::Crate }];
        for &backend in backends {
            for script in SCRIPTS.iter().filter(|script| script.backends.contains(&backend)) {
                let test = |&guest| Self { script: script.name, subject: Subject::Disks(backend, guest) };
                tests.extend(script.guests.iter().map(test));
            }
            if backend == Backend::Tapline {
                tests.extend(HOSTILE.map(|script| Self { script, subject: Subject::Hostile }));
            }
        }
        tests
    }

    /// `crate`, `tapline-cycles`, `blkback-attach-pv`.
    pub fn name(&self) -> String {
        match self.subject {
            Subject::Crate => self.script.to_owned(),
            Subject::Hostile => format!("{}-{}", Backend::Tapline.name(), self.script),
            Subject::Disks(backend, guest) => format!("{}-{}-{}", backend.name(), self.script, guest.name()),
        }
    }

    /// Whether `word` means this test: its script, its name or the beginning of either.
    pub fn is_meant_by(&self, word: &str) -> bool {
        let begins = |name: &str| name.strip_prefix(word).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'));
        begins(self.script) || begins(&self.name())
    }

    /// Whether dom0 needs our programs for it.
    pub fn uses_tapline(&self) -> bool {
        match self.subject {
            Subject::Crate => false,
            Subject::Hostile => true,
            // A peer's qcow2 is made and judged by ours.
            Subject::Disks(backend, _) => backend == Backend::Tapline || self.script == "qcow2",
        }
    }

    /// Whether dom0 needs our daemon for it.
    pub fn uses_daemon(&self) -> bool {
        self.script.starts_with("daemon")
    }

    /// What the script reads, as assignments of the shell.
    pub fn parameters(&self) -> String {
        match self.subject {
            Subject::Crate | Subject::Hostile => String::new(),
            Subject::Disks(backend, guest) => format!("backend={}\nguest_type={}\n", backend.name(), guest.name()),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn names_are_different_and_say_what_they_mean() {
        let tests = Test::all(&Backend::ALL);
        let names: std::collections::BTreeSet<String> = tests.iter().map(Test::name).collect();

        assert_eq!(names.len(), tests.len());
        assert!(names.contains("qdisk-attach-pv"));
        assert!(names.contains("tapline-snapshot-pvh") && !names.contains("qdisk-snapshot-pvh"));
    }

    #[test]
    fn our_front_end_is_for_our_backend() {
        let hostile = |backend| Test::all(&[backend]).iter().any(|test| test.subject == Subject::Hostile);

        assert!(hostile(Backend::Tapline) && !hostile(Backend::Blkback));
    }

    #[test]
    fn a_test_is_meant_by_its_name_and_whole_words_at_its_beginning() {
        let test = Test { script: "attach", subject: Subject::Disks(Backend::Qdisk, Guest::Pvh) };

        assert!(test.is_meant_by("attach"));
        assert!(test.is_meant_by("qdisk"));
        assert!(test.is_meant_by("qdisk-attach-pvh"));
        assert!(!test.is_meant_by("qdisk-attach-pv"));
        assert!(!test.is_meant_by("q"));
    }
}
