//! What can be wrong with an image, or with a program that uses it.

/// Kinds of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Bytes that the image has never had, or no longer.
    Foreign,
    /// Answered writes are missing, though there was no power loss.
    Lost,
    /// A sound image is refused.
    Refused,
    /// A program failed, of ours or of others.
    Program,
}

/// A failure of a use.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Its kind.
    pub class: Class,
    /// What was found.
    pub what: String,
}

impl Failure {
    /// A failure of this kind.
    pub fn new(class: Class, what: String) -> Failure {
        Failure { class, what }
    }

    /// That of a program.
    pub fn of_program(what: String) -> Failure {
        Failure::new(Class::Program, what)
    }
}

impl From<String> for Failure {
    fn from(what: String) -> Failure {
        Failure::of_program(what)
    }
}
