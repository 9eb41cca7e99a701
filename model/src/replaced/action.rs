//! Actions on an image between two uses.

/// An action on an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, clap::ValueEnum)]
pub enum Action {
    /// Does nothing.
    Nothing,
    /// Changes the permissions.
    Chmod,
    /// Sets the modification time to a year ago.
    TouchPast,
    /// Sets the modification time to a year from now.
    TouchFuture,
    /// Renames the image.
    Rename,
    /// Adds a hard link, and uses the image by that name.
    Link,
    /// Moves the image away and back.
    MoveBack,
    /// Detaches the device and attaches the same file to it again.
    Reattach,
    /// Attaches the same file to a device with another number.
    Renumber,
    /// Renames another image over it.
    RenameOver,
    /// Writes another image into the file or device.
    Overwrite,
    /// Removes the file, and creates others until one has its inode number.
    Recreate,
    /// Attaches another image to the device.
    GiveNumber,
    /// Runs `qemu-img convert` into its place.
    QemuConvert,
    /// Runs `qemu-img convert -n` into it.
    QemuConvertInto,
    /// Runs `qemu-img create` in its place.
    QemuCreate,
    /// Runs `image create --force` on the device.
    CreateForce,
    /// Runs `image create`, which must be refused.
    CreateRefused,
    /// Runs `image convert --force` in its place.
    ConvertForce,
    /// Runs `image resize`.
    Resize,
    /// Runs `image flatten`.
    Flatten,
    /// Runs `image rebase` onto a copy of its parent.
    Rebase,
    /// Runs `image merge` into its parent.
    Merge,
    /// Runs `image snapshot`.
    Snapshot,
    /// Runs `image check --repair`.
    Repair,
    /// Runs `image compact`.
    Compact,
    /// Lets QEMU write to it.
    QemuWrite,
    /// Runs `qemu-img check -r all`.
    QemuRepair,
    /// Runs `qemu-img snapshot -c`.
    QemuSnapshot,
    /// Truncates the file.
    Truncate,
}

/// The image that takes its place, for actions that replace it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, clap::ValueEnum)]
pub enum Source {
    /// A copy made before the image was served last.
    AtRest,
    /// A copy made while it was served, after a flush.
    Flushed,
    /// An atomic copy (reflink) made while it was served.
    Atomic,
    /// Another image.
    Other,
}

impl Action {
    /// Whether the action puts another image in its place.
    pub fn has_source(self) -> bool {
        matches!(self, Action::RenameOver | Action::Overwrite | Action::Recreate | Action::GiveNumber)
    }
}

/// An action with the image that takes the place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Step {
    /// The action on the image.
    pub action: Action,
    /// The source of the other image, if the action has one.
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
