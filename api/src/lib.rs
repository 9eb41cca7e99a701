//! The interface between the daemon and its clients: objects, requests, errors and events.
//!
//! The nouns and verbs are XenAPI's: SR (storage repository), VDI (virtual disk image), VBD (a VDI plugged into a VM),
//! VM, host, task. Sizes are in bytes, times are RFC 3339 in UTC, identities are UUIDs. A request value that exists is
//! valid: names, sizes and paths have types that cannot hold anything else, and unknown fields are rejected.
//!
//! This crate knows nothing about storage or about how the daemon works; only the client ([`client`]) knows HTTP.

#![forbid(unsafe_code)]

mod autostart;
mod backup_place;
mod backup_target;
mod calibration;
mod cbt;
#[cfg(feature = "client")]
pub mod client;
mod disk_limits;
mod download;
mod event;
pub mod health;
mod host;
mod inventory;
mod label;
mod problem;
mod requester;
mod retention;
mod seed;
mod share;
mod sr;
mod statistics;
mod task;
mod token;
mod upload;
mod value;
mod vbd;
mod vdi;
mod visible;
mod vm;
mod vm_snapshot;
mod web;

pub use autostart::Autostart;
pub use backup_place::{BackupPlace, Region, S3Access, ServerUrl};
pub use backup_target::{
    BackupId, BackupMoment, BackupPrune, BackupRemove, BackupTarget, BackupTargetAdd, DiskBackup, VdiBackup,
    VdiRestore, VdiRestoreInPlace, VmBackup, VmRestore, VmRestoreInPlace,
};
pub use calibration::{
    CalibrationOperation, SizeRule, SrCalibrate, SrCalibrated, SrCalibration, SrMeasured, SrPolicy, Storage,
};
pub use cbt::{BackupBase, ChangeMap, ChangeTracking, ChangedExtent, ChangesFormat, VdiChanges, map_file};
pub use disk_limits::DiskLimits;
pub use download::{DOWNLOAD_PIECE, Download};
pub use event::{Change, Event, ObjectKind};
pub use health::{Health, HealthState};
pub use host::{Backup, BackupReason, Difference, DifferenceKind, Host, HostDrain, HostReconcile, Limits};
pub use inventory::{Inventory, InventoryImage, InventoryVdi};
pub use label::{Labels, OtherConfig, Tag, Tags};
pub use problem::{Code, Details, KINDS, Kind, Problem};
pub use requester::Requester;
pub use retention::{BackupSchedule, Retention};
pub use seed::{Seed, SeedText};
pub use share::{DiskShare, SHARE_DEPTH, SHARE_WEIGHT};
pub use sr::{
    Forecast, Placed, Scan, Space, Sr, SrAttach, SrBelieve, SrCreate, SrDestroyPlan, SrFound, SrIntroduce, SrPatch,
    SrProbe, SrSource, SrState, SrType, Unplaced, Variant, Versions,
};
pub use statistics::{
    DeviceOperations, DeviceStatistics, DiskStatistics, GuestLayer, HistoryPoint, HostLayer, LatencyBucket, Operation,
    OperationStatistics, RequestInFlight, StageInFlight, StageTimes, VbdHistory,
};
pub use task::{About, Task, TaskState, Transfer};
pub use token::{Role, Secret, Token, TokenCreate, TokenMade};
pub use upload::{Upload, UploadCreate};
pub use value::{AbsolutePath, Description, LogicalBlockSize, Name, Size};
pub use vbd::{Mode, Transport, Use, Vbd, VbdCreate, VbdPatch, VbdState, VbdUnplug, VbdUpgraded, Vbds};
pub use vdi::{
    Believed, ImageFormat, SourceFormat, Vdi, VdiClone, VdiCopy, VdiCreate, VdiDestroyPlan, VdiExport, VdiImport,
    VdiPatch, VdiReconcile, VdiResize, VdiRevert, VdiSnapshot, VdiState,
};
pub use visible::visible;
pub use vm::{Boot, CONSOLE_PROTOCOL, Driver, Power, Suspended, Vm, VmCreate, VmHardware, VmPatch, VmShutdown};
pub use vm_snapshot::{VmClone, VmRevert, VmSnapshot, VmSnapshotCreate, VmSnapshotDisk, VmSnapshotPatch};
pub use web::{FileChecksum, ImageUrl};
