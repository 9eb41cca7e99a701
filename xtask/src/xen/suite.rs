//! The tests by name: which script of `testbed/xen/tests` runs in dom0, on whose backend, and for which kind of guest.
//!
//! Knows nothing of how they run.

/// Who serves the guests' disks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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
}

impl Guest {
    pub fn name(self) -> &'static str {
        match self {
            Self::Pv => "pv",
            Self::Pvh => "pvh",
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Test {
    /// A script in `testbed/xen/tests`, without its `.sh`.
    pub script: &'static str,
    pub subject: Subject,
}

/// Scripts that a backend must pass, with the kinds of guest.
const DISKS: [(&str, &[Guest]); 5] = [
    ("attach", &[Guest::Pvh, Guest::Pv]),
    ("depths", &[Guest::Pvh]),
    ("plug", &[Guest::Pvh]),
    ("killed", &[Guest::Pvh]),
    ("many", &[Guest::Pvh]),
];

/// Scripts that only our backend can pass, or that are about its process.
const OURS: [(&str, &[Guest]); 2] = [("idle", &[Guest::Pvh]), ("upgrade", &[Guest::Pvh])];

/// Scripts with a front end of our own.
const HOSTILE: [&str; 4] = ["hostile-requests", "hostile-handshake", "hostile-pressure", "cycles"];

/// Scripts about the life of a disk: what only our backend and its toolstack do.
const LIFE: [(&str, &[Guest]); 9] = [
    ("restart", &[Guest::Pvh]),
    ("late", &[Guest::Pvh]),
    ("unplug", &[Guest::Pvh]),
    ("script", &[Guest::Pvh, Guest::Pv]),
    ("reboot", &[Guest::Pvh]),
    ("reconnect", &[Guest::Pvh]),
    ("destroyed", &[Guest::Pvh]),
    ("driver", &[Guest::Pvh]),
    ("refused", &[Guest::Pvh]),
];

impl Test {
    /// The tests of `backends`, after those that need none.
    pub fn all(backends: &[Backend]) -> Vec<Self> {
        let mut tests = vec![Self { script: "crate", subject: Subject::Crate }];
        for &backend in backends {
            let ours =
                if backend == Backend::Tapline { [OURS.as_slice(), LIFE.as_slice()].concat() } else { Vec::new() };
            for (script, guests) in DISKS.into_iter().chain(ours) {
                tests.extend(guests.iter().map(|&guest| Self { script, subject: Subject::Disks(backend, guest) }));
            }
            if backend == Backend::Tapline {
                tests.extend(HOSTILE.map(|script| Self { script, subject: Subject::Hostile }));
            }
        }
        tests
    }

    /// Whether our disk processes take part.
    pub fn needs_tapline(&self) -> bool {
        matches!(self.subject, Subject::Hostile | Subject::Disks(Backend::Tapline, _))
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
