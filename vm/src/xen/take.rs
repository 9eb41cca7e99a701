//! Detaches a disk from a guest: asks both ends to close, and removes the remains of the device.
//!
//! It knows nothing about serving processes. Invariant: only nodes of the given device are touched, whatever a guest
//! has written into those it owns.

use xen::{Store, Transaction};

use super::device::{Device, State, remove_own_end, store_failed, text, together, write_all};
use super::error::NotDone;

/// Asks both ends to close.
pub fn ask(store: &mut dyn Store, device: &Device) -> Result<(), NotDone> {
    together(store, |store, within| close(store, within, device))
}

/// Like libxl: offline, and Closing unless it has closed already.
fn close(store: &mut dyn Store, within: Option<Transaction>, device: &Device) -> Result<(), NotDone> {
    match device.states(store, within)?.0 {
        None => Ok(()),
        Some(State::CLOSED) => write_all(store, within, &device.backend(), &[("online", "0")]),
        Some(_) => {
            let closing = State::CLOSING.digits();
            write_all(store, within, &device.backend(), &[("online", "0"), ("state", &closing)])
        }
    }
}

/// Removes both ends' nodes, what xl may know of the device, and the node above ours when it is empty.
pub fn remove(store: &mut dyn Store, device: &Device) -> Result<(), NotDone> {
    together(store, |store, within| {
        let of_xl = text(store, within, &format!("{}/backend", device.of_xl()))?;
        if of_xl.is_some_and(|backend| backend == device.backend()) {
            store.remove(within, &device.of_xl()).map_err(store_failed)?;
        }
        // A frontend that has found another backend in the meantime is no longer ours.
        let served_by = text(store, within, &format!("{}/backend", device.frontend()))?;
        if served_by.is_none_or(|backend| backend == device.backend()) {
            store.remove(within, &device.frontend()).map_err(store_failed)?;
        }
        remove_own_end(store, within, device)
    })
}
