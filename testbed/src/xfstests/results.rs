//! Parses the results of tests from the output of xfstests' `check`.
//!
//! Knows nothing about guests. Invariant: a test has a result only if `check` has completed.

use std::collections::BTreeMap;
use std::fmt;

/// The result of a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Passed {
        seconds: u64,
    },
    Failed {
        why: String,
    },
    NotRun {
        why: String,
    },
    /// The guest hung or ended during the test.
    TookTheGuest {
        how: String,
    },
}

impl Outcome {
    /// A word for tables.
    pub fn word(&self) -> &'static str {
        match self {
            Outcome::Passed { .. } => "passed",
            Outcome::Failed { .. } => "failed",
            Outcome::NotRun { .. } => "not run",
            Outcome::TookTheGuest { .. } => "took the guest",
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Passed { seconds } => write!(text, "passed\t{seconds} s"),
            Outcome::Failed { why } | Outcome::NotRun { why } | Outcome::TookTheGuest { how: why } => {
                write!(text, "{}\t{why}", self.word())
            }
        }
    }
}

/// Results of tests by name.
#[derive(Clone, Debug, Default)]
pub struct Results {
    pub outcomes: BTreeMap<String, Outcome>,
}

impl Results {
    /// Processes a line. `check` prints `TEST 3s`, `TEST 3s ... 4s`, `TEST [not run] WHY` or `TEST [failed, …`; errors
    /// found after a test, in its file system or in the kernel's messages, appear in its final list only.
    pub fn process_line(&mut self, line: &str) {
        if let Some(failures) = line.strip_prefix("Failures: ") {
            for test in failures.split_whitespace() {
                self.fail(test, "found behind the test: see the console");
            }
            return;
        }
        let Some((test, said)) = line.split_once(char::is_whitespace) else { return };
        if !is_test(test) {
            return;
        }
        let said = said.trim();
        let last = said.rsplit(' ').next().unwrap_or_default();
        let outcome = match (said.split_once("[not run]"), last.strip_suffix('s').map(str::parse)) {
            (Some((_, why)), _) => Outcome::NotRun { why: why.trim().to_owned() },
            (None, Some(Ok(seconds))) => Outcome::Passed { seconds },
            _ => Outcome::Failed { why: said.to_owned() },
        };
        self.outcomes.insert(test.to_owned(), outcome);
    }

    fn fail(&mut self, test: &str, why: &str) {
        let known = self.outcomes.get(test);
        if !matches!(known, Some(Outcome::Failed { .. } | Outcome::TookTheGuest { .. })) {
            self.outcomes.insert(test.to_owned(), Outcome::Failed { why: why.to_owned() });
        }
    }

    /// Number of tests with a result.
    pub fn count(&self, word: &str) -> usize {
        self.outcomes.values().filter(|outcome| outcome.word() == word).count()
    }
}

/// Whether a word is the name of a test, such as `generic/001`.
pub fn is_test(word: &str) -> bool {
    let number = word.split_once('/').filter(|(group, _)| group.chars().all(|letter| letter.is_ascii_alphanumeric()));
    number.is_some_and(|(_, number)| number.len() >= 3 && number.bytes().all(|digit| digit.is_ascii_digit()))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn each_kind_of_result_is_parsed() {
        let mut results = Results::default();
        let said = "\
FSTYP         -- ext4
MKFS_OPTIONS  -- -F /dev/vdc

generic/001         7s
generic/002  1s ...  2s
generic/003  [not run] atime related mount options have no effect on ext4
generic/004  [failed, exit status 1]- output mismatch (see /xfstests/results//generic/004.out.bad)
    --- tests/generic/004.out\t2025-12-23
generic/005         3s
Ran: generic/001 generic/002 generic/003 generic/004 generic/005
Not run: generic/003
Failures: generic/004 generic/005
Failed 2 of 5 tests";
        said.lines().for_each(|line| results.process_line(line));
        let of = |test: &str| results.outcomes.get(test).cloned();
        assert_eq!(of("generic/001"), Some(Outcome::Passed { seconds: 7 }));
        assert_eq!(of("generic/002"), Some(Outcome::Passed { seconds: 2 }));
        assert!(matches!(of("generic/003"), Some(Outcome::NotRun { why }) if why.starts_with("atime")));
        assert!(matches!(of("generic/004"), Some(Outcome::Failed { why }) if why.contains("exit status 1")));
        assert!(matches!(of("generic/005"), Some(Outcome::Failed { why }) if why.contains("behind the test")));
        assert_eq!(results.outcomes.len(), 5);
    }
}
