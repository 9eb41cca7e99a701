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
            let life = if backend == Backend::Tapline { LIFE.as_slice() } else { &[] };
            for (script, guests) in DISKS.iter().chain(life) {
                tests.extend(guests.iter().map(|&guest| Self { script, subject: Subject::Disks(backend, guest) }));
            }
        }
        tests
    }

    /// `crate`, `blkback-attach-pv`.
    pub fn name(&self) -> String {
        match self.subject {
            Subject::Crate => self.script.to_owned(),
            Subject::Disks(backend, guest) => format!("{}-{}-{}", backend.name(), self.script, guest.name()),
        }
    }

    /// Whether `word` means this test: its script, its name or the beginning of it.
    pub fn is_meant_by(&self, word: &str) -> bool {
        let name = self.name();
        self.script == word || name.strip_prefix(word).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    }

    /// What the script reads, as assignments of the shell.
    pub fn parameters(&self) -> String {
        match self.subject {
            Subject::Crate => String::new(),
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
    fn a_test_is_meant_by_its_name_and_whole_words_at_its_beginning() {
        let test = Test { script: "attach", subject: Subject::Disks(Backend::Qdisk, Guest::Pvh) };

        assert!(test.is_meant_by("attach"));
        assert!(test.is_meant_by("qdisk"));
        assert!(test.is_meant_by("qdisk-attach-pvh"));
        assert!(!test.is_meant_by("qdisk-attach-pv"));
        assert!(!test.is_meant_by("q"));
    }
}
