//! What the daemon and its clients say to each other: objects, requests, errors and events.
//!
//! The nouns and verbs are XenAPI's: SR (storage repository), VDI (virtual disk image), VBD (a VDI plugged into a VM),
//! VM, host, task. Sizes are bytes, times RFC 3339 in UTC, identities UUIDs. A request that exists has been checked:
//! names, sizes and paths are types that cannot hold anything else, and a field that is not known is refused. It knows
//! nothing of storage or of how the daemon does what it is asked; of HTTP, only the client ([`client`]) does.

#![forbid(unsafe_code)]

mod autostart;
#[cfg(feature = "client")]
pub mod client;
mod event;
mod host;
mod inventory;
mod problem;
mod sr;
mod task;
mod token;
mod value;
mod vbd;
mod vdi;
mod visible;
mod vm;

pub use autostart::Autostart;
pub use event::{Change, Event, ObjectKind};
pub use host::{Backup, BackupReason, Difference, Host, HostDrain, HostReconcile, Limits};
pub use inventory::{Inventory, InventoryImage, InventoryVdi};
pub use problem::{Code, Problem};
pub use sr::{
    Forecast, Placed, Scan, Space, Sr, SrBelieve, SrCreate, SrDestroyPlan, SrFound, SrIntroduce, SrPatch, SrProbe,
    SrSource, SrState, Unplaced, Variant, Versions,
};
pub use task::{About, Task, TaskState};
pub use token::{Secret, Token, TokenCreate, TokenMade};
pub use value::{AbsolutePath, Description, Name, Size};
pub use vbd::{Mode, Transport, Use, Vbd, VbdCreate, VbdPatch, VbdState, VbdUnplug, VbdUpgraded, Vbds};
pub use vdi::{
    Believed, ImageFormat, Vdi, VdiClone, VdiCopy, VdiCreate, VdiExport, VdiImport, VdiPatch, VdiReconcile, VdiResize,
    VdiRevert, VdiSnapshot, VdiState,
};
pub use visible::visible;
pub use vm::{Boot, Driver, Power, Vm, VmCreate, VmPatch, VmShutdown};
