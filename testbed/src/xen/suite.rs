//! The tests by name: the script of `testbed/xen/tests` that runs in dom0, the backend, and the type of guest.
//!
//! Knows nothing about how they run.

/// The backend that serves the guests' disks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Backend {
    /// The kernel's backend.
    Blkback,
    /// QEMU's backend.
    Qdisk,
    /// Tapline's backend.
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

/// The subject of a test.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Subject {
    /// The tests of the crate `xen`, in dom0 itself.
    Crate,
    /// The test front end in dom0, which violates the protocol.
    Hostile,
    /// The disks of a guest.
    Disks(Backend, Guest),
}

/// The type of a guest.
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
    /// The name of a script in `testbed/xen/tests`, without `.sh`.
    pub script: &'static str,
    pub subject: Subject,
}

/// A script for disks of a guest.
struct Script {
    name: &'static str,
    /// The backends that support what it tests.
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

/// The scripts, with the backends that must pass them. Other backends run those that they support, which shows that the
/// script is right.
const SCRIPTS: [Script; 39] = [
    Script { name: "attach", backends: ALL, guests: &[Guest::Pvh, Guest::Pv] },
    Script::new("depths", ALL),
    Script::new("plug", ALL),
    Script::new("killed", ALL),
    Script::new("many", ALL),
    // QEMU 7.2's fails on a read-only disk: "Block node is read-only".
    Script::new("readonly", &[Backend::Blkback, Backend::Tapline]),
    Script::new("flush", ALL),
    Script::new("discard", ALL),
    // QEMU's disks have sectors of 512 bytes, and xl cannot select another size.
    Script::new("sectors", &[Backend::Blkback, Backend::Tapline]),
    // Tapline's block script presents disks to firmware differently: `boot`.
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
    // The life of a disk process.
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
    // Disks and guests managed by the daemon.
    Script { name: "daemon", backends: OURS, guests: &[Guest::Pvh, Guest::Pv] },
    Script::new("kexec", OURS),
    Script { name: "pygrub", backends: OURS, guests: &[Guest::Pvh, Guest::Pv] },
    Script::new("daemon-ends", OURS),
    Script::new("daemon-save", OURS),
];

/// Scripts with the test front end.
const HOSTILE: [&str; 5] = ["hostile-requests", "hostile-handshake", "hostile-pressure", "cycles", "deaths"];

impl Test {
    /// The tests of `backends`, after those without a backend.
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

    /// The name of the test: `crate`, `tapline-cycles`, `blkback-attach-pv`.
    pub fn name(&self) -> String {
        match self.subject {
            Subject::Crate => self.script.to_owned(),
            Subject::Hostile => format!("{}-{}", Backend::Tapline.name(), self.script),
            Subject::Disks(backend, guest) => format!("{}-{}-{}", backend.name(), self.script, guest.name()),
        }
    }

    /// Whether `word` selects this test: its script, its name or the beginning of either.
    pub fn is_selected_by(&self, word: &str) -> bool {
        let begins = |name: &str| name.strip_prefix(word).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'));
        begins(self.script) || begins(&self.name())
    }

    /// Whether dom0 needs Tapline's programs for it.
    pub fn uses_tapline(&self) -> bool {
        match self.subject {
            Subject::Crate => false,
            Subject::Hostile => true,
            // qcow2 images of other backends are created and checked by Tapline's programs.
            Subject::Disks(backend, _) => backend == Backend::Tapline || self.script == "qcow2",
        }
    }

    /// Whether dom0 needs `taplined` for it.
    pub fn uses_daemon(&self) -> bool {
        self.script.starts_with("daemon")
    }

    /// The parameters of the script, as shell assignments.
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
    fn names_are_unique_and_describe_the_test() {
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
    fn a_test_is_selected_by_its_name_or_its_first_words() {
        let test = Test { script: "attach", subject: Subject::Disks(Backend::Qdisk, Guest::Pvh) };

        assert!(test.is_selected_by("attach"));
        assert!(test.is_selected_by("qdisk"));
        assert!(test.is_selected_by("qdisk-attach-pvh"));
        assert!(!test.is_selected_by("qdisk-attach-pv"));
        assert!(!test.is_selected_by("q"));
    }
}
