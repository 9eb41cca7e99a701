//! The keys that the disk's process writes into its backend's node in addition to the handshake, and those that
//! toolstacks write there for it.
//!
//! It knows nothing about rings. Invariant: the guest cannot read private keys; keys that an earlier process has
//! written about itself do not remain.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use control::POLLING_MAX_US;
use rustix::fs::{major, minor};
use xen::Store;

use crate::files::Files;
use crate::process::failure::Failure;
use arguments::Serve;
use vm::xen::device::{Device, store_failed, text, together, write_all};

/// The key in our backend's node with the serving process: readers of statistics look up tapdisk3 there. It is present
/// while the process runs.
pub const KTHREAD_PID: &str = "kthread-pid";

/// Writes which process serves what, for `tapline xen list` and readers of statistics, unreadable for the guest; and
/// the keys that toolstacks expect in any backend's node: that its device exists, and which one it is.
pub fn write_keys(files: &Files, store: &mut dyn Store, device: &Device, serve: &Serve) -> Result<(), Failure> {
    let control = serve.control.as_deref().map(crate::serve::absolute).transpose()?;
    let (pid, image) = (std::process::id().to_string(), serve.image.to_string());
    let node = format!("{}/tapline", device.backend());
    let physical = physical_device(files, serve.image.path());
    together(store, |store, within| {
        if device.states(store, within)?.0.is_none() {
            return Err(Failure::new(format!("serve {device}"), "it was removed in the meantime"));
        }
        let kthread_pid = format!("{}/{KTHREAD_PID}", device.backend());
        for (node, value) in [(&node, ""), (&kthread_pid, &pid)] {
            store.write(within, node, value.as_bytes()).map_err(store_failed)?;
            store.set_permissions(within, node, &[&format!("n{}", device.own)]).map_err(store_failed)?;
        }
        write_all(store, within, &device.backend(), &[("hotplug-status", "connected")])?;
        match &physical {
            Some(physical) => write_all(store, within, &device.backend(), &[("physical-device", physical)])?,
            // The key may be left from another image, which was served before.
            None => store.remove(within, &format!("{}/physical-device", device.backend())).map_err(store_failed)?,
        }
        write_all(store, within, &node, &[("pid", &pid), ("image", &image)])?;
        match &control {
            Some(control) => write_all(store, within, &node, &[("control", &control.to_string_lossy())])?,
            None => store.remove(within, &format!("{node}/control")).map_err(store_failed)?,
        }
        Ok(())
    })
}

/// Returns a block device in the notation of Linux's block scripts, which use it to check that it is not attached to
/// two guests; `None` for a file.
fn physical_device(files: &Files, image: &Path) -> Option<String> {
    let metadata = files.metadata(image).ok().filter(|metadata| metadata.file_type().is_block_device())?;
    Some(format!("{:x}:{:x}", major(metadata.rdev()), minor(metadata.rdev())))
}

/// Returns the polling time set by the toolstack (tapback's keys, from a VBD's other-config) in microseconds: zero if
/// the toolstack requires the processors to be more than idle first. Otherwise their idle time is not checked, because
/// polling stops by itself if it is not worthwhile.
pub fn requested_polling(store: &mut dyn Store, device: &Device) -> Result<Option<Duration>, Failure> {
    let mut number = |key: &str| -> Result<Option<u64>, Failure> {
        let value = text(store, None, &format!("{}/{key}", device.backend()))?;
        Ok(value.and_then(|value| value.trim().parse().ok()))
    };
    let Some(most) = number("polling-duration")? else { return Ok(None) };
    let never = number("polling-idle-threshold")?.is_some_and(|percent| percent >= 100);
    Ok(Some(Duration::from_micros(if never { 0 } else { most.min(POLLING_MAX_US) })))
}
