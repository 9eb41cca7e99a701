//! Failures of an image or of a program that uses it.

/// Classes of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FailureClass {
    /// The image shows bytes that it never had, or no longer has.
    Foreign,
    /// Answered writes are missing without a power loss.
    Lost,
    /// A sound image is refused.
    Refused,
    /// A program failed, ours or another.
    Program,
}

/// A failure found in a use of an image.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The class of the failure.
    pub class: FailureClass,
    /// A description of the failure.
    pub what: String,
}

impl Failure {
    /// Creates a failure of this class.
    pub fn new(class: FailureClass, what: String) -> Failure {
        Failure { class, what }
    }

    /// Creates a failure of a program.
    pub fn of_program(what: String) -> Failure {
        Failure::new(FailureClass::Program, what)
    }
}

impl From<String> for Failure {
    fn from(what: String) -> Failure {
        Failure::of_program(what)
    }
}
