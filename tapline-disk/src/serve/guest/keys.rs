//! What the disk's process writes into its end's node beside the handshake, and what toolstacks write there for it.
//!
//! Knows nothing of rings. Keeps: what is none of the guest's business it cannot read; what a process before has
//! written of itself does not stay.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{major, minor};
use xen::Store;

use crate::cli::Serve;
use crate::failure::Failure;
use crate::files;
use crate::toolstack::device::{Device, store_failed, text, together, write_all};

/// In our end's node, who serves it: readers of statistics look for tapdisk3's there. It means a process that lives.
pub const KTHREAD_PID: &str = "kthread-pid";

/// Who serves what, for `tapline xen list` and readers of statistics, which the guest may not read; and what toolstacks
/// look for in the node of any back end: that its device is there, and which it is.
pub fn leave_word(store: &mut dyn Store, device: &Device, serve: &Serve) -> Result<(), Failure> {
    let control = serve.control.as_deref().map(crate::serve::absolute).transpose()?;
    let (pid, image) = (std::process::id().to_string(), serve.image.to_string());
    let node = format!("{}/tapline", device.backend());
    let physical = physical_device(serve.image.path());
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
            // That of another image, which was served before.
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

/// A block device as Linux's block scripts write it, by which they see that it is not given to two guests. A file has
/// none.
fn physical_device(image: &Path) -> Option<String> {
    let metadata = files::metadata(image).ok().filter(|metadata| metadata.file_type().is_block_device())?;
    Some(format!("{:x}:{:x}", major(metadata.rdev()), minor(metadata.rdev())))
}

/// The longest look before sleeping, as `--poll-max` has it.
const POLLING_MAX: u64 = 10_000;

/// For how long to look for more before sleeping, if the toolstack has said so (tapback's keys, from a VBD's
/// other-config): microseconds, none of them where it wants the processors to be more than idle first. How much of them
/// is idle is not asked for below that: looking ends by itself where it is not worth it.
pub fn asked_polling(store: &mut dyn Store, device: &Device) -> Result<Option<Duration>, Failure> {
    let mut number = |key: &str| -> Result<Option<u64>, Failure> {
        let value = text(store, None, &format!("{}/{key}", device.backend()))?;
        Ok(value.and_then(|value| value.trim().parse().ok()))
    };
    let Some(most) = number("polling-duration")? else { return Ok(None) };
    let never = number("polling-idle-threshold")?.is_some_and(|percent| percent >= 100);
    Ok(Some(Duration::from_micros(if never { 0 } else { most.min(POLLING_MAX) })))
}
