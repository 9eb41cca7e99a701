//! What happens to an image between two uses, by name.

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, clap::ValueEnum)]
pub enum Action {
    /// Nothing.
    Nothing,
    /// Other permissions.
    Chmod,
    /// A time of modification a year ago.
    TouchPast,
    /// One in a year.
    TouchFuture,
    /// Another name.
    Rename,
    /// A further name, by which it is used then.
    Link,
    /// Moved away and back.
    MoveBack,
    /// The device is detached, and the same file is attached to it again.
    Reattach,
    /// The same, to a device of another number.
    Renumber,
    /// Another image is renamed over it.
    RenameOver,
    /// Another image is written into the file or the device.
    Overwrite,
    /// It is removed, and another one is created until that has its inode.
    Recreate,
    /// Its device number is given to another image.
    GiveNumber,
    /// `qemu-img convert` into it.
    QemuConvert,
    /// `qemu-img convert -n` into it.
    QemuConvertInto,
    /// `qemu-img create` in its place.
    QemuCreate,
    /// `image create --force` on the device.
    CreateForce,
    /// `image create`, which must be refused.
    CreateRefused,
    /// `image convert --force` in its place.
    ConvertForce,
    /// `image resize`.
    Resize,
    /// `image flatten`.
    Flatten,
    /// `image rebase` onto a copy of its parent.
    Rebase,
    /// `image merge` into its parent.
    Merge,
    /// `image snapshot`.
    Snapshot,
    /// `image check --repair`.
    Repair,
    /// `image compact`.
    Compact,
    /// QEMU writes to it.
    QemuWrite,
    /// `qemu-img check -r all`.
    QemuRepair,
    /// `qemu-img snapshot -c`.
    QemuSnapshot,
    /// It is cut off.
    Truncate,
}

/// Which image takes its place, where one does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, clap::ValueEnum)]
pub enum Source {
    /// A copy that was made before it was served last.
    AtRest,
    /// A copy that was made while it was served, after a flush.
    Flushed,
    /// A copy that was made while it was served, of one moment (reflink).
    Atomic,
    /// Another one.
    Other,
}

impl Action {
    /// Whether another image comes from somewhere.
    pub fn has_source(self) -> bool {
        matches!(self, Action::RenameOver | Action::Overwrite | Action::Recreate | Action::GiveNumber)
    }
}

/// An action, and what comes in the place of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Step {
    /// What is done.
    pub action: Action,
    /// With what, where that matters.
    pub source: Source,
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.action.has_source() {
            true => write!(f, "{:?}({:?})", self.action, self.source),
            false => write!(f, "{:?}", self.action),
        }
    }
}
