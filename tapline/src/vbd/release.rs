//! Prepares to take disks from running guests: requests confirmation if it is the boot disk, and names the guest that
//! the command waits for.

use api::{Power, Problem, Vbd, VbdState};

use crate::confirm::Confirm;
use crate::output::say;
use crate::session::Session;

/// Requests confirmation before a running machine loses its boot disk, and names the guests that must release a disk.
pub async fn prepare(session: &Session, vbds: &[Vbd], force: bool, confirm: Confirm) -> Result<(), Problem> {
    let plugged = vbds.iter().filter(|vbd| vbd.state == VbdState::Plugged);
    for (vbd, vm) in plugged.filter_map(|vbd| Some((vbd, vbd.vm?))) {
        let vm = session.client.vm(vm).await?;
        if !matches!(vm.power, Power::Running | Power::Paused) {
            continue;
        }
        let disk = session.client.vdi(vbd.vdi).await?.name;
        if vbd.bootable {
            confirm.ask(&format!("unplug '{disk}', the boot disk of the running machine '{}'", vm.name))?;
        }
        if !force && !session.json() {
            say(&format!(
                "tapline: waiting for the guest of '{}' to release '{disk}' (--force does not wait)\n",
                vm.name
            ));
        }
    }
    Ok(())
}
