//! Names of VMs, devices, VDIs and SRs, and the health of VBDs, from the daemon if there is one.
//!
//! A separate thread requests them from the daemon every second, so that nothing waits for it. Invariant: without a
//! daemon there are no names, and everything else works.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use api::client::Client;
use api::{Health, Problem, Transport, Vbd};
use uuid::Uuid;

/// Interval between requests: a disk's health is shown within two seconds.
const REQUEST_INTERVAL: Duration = Duration::from_secs(1);
/// Number of requests after which known names are requested again, because they may have changed.
const REFRESH_ROUNDS: u32 = 60;

/// The daemon's names for the disk of a VBD.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Name {
    /// The name of its machine.
    pub vm: Option<String>,
    /// Its usual name in the guest.
    pub device: String,
    /// The name of the VDI.
    pub vdi: String,
    /// The VDI's UUID.
    pub vdi_uuid: Uuid,
    /// The name of the VDI's repository.
    pub sr: String,
    /// The health of the VBD in the latest reply.
    pub health: Health,
}

/// Names by the UUIDs of VBDs.
pub type NamesByVbd = HashMap<Uuid, Name>;

/// The latest names from the daemon, if there is one.
#[derive(Debug, Default)]
pub struct Names {
    known: NamesByVbd,
    answers: Option<Receiver<Option<NamesByVbd>>>,
}

impl Names {
    /// Starts a thread that requests the names from this daemon.
    pub fn from_daemon(client: Client) -> Names {
        let (sender, answers) = sync_channel(1);
        // The thread ends with the process, or when the receiver is dropped.
        let begun = std::thread::Builder::new().name("names".into()).spawn(move || request_names(&client, &sender));
        Names { known: NamesByVbd::new(), answers: begun.is_ok().then_some(answers) }
    }

    /// Waits for the first reply for at most this time.
    pub fn wait(&mut self, at_most: Duration) {
        if let Some(Ok(Some(known))) = self.answers.as_ref().map(|answers| answers.recv_timeout(at_most)) {
            self.known = known;
        }
    }

    /// Takes replies that have arrived.
    pub fn take(&mut self) {
        while let Some(Ok(answer)) = self.answers.as_ref().map(Receiver::try_recv) {
            // If the daemon is gone or slow, the known names stay.
            self.known = answer.unwrap_or_else(|| std::mem::take(&mut self.known));
        }
    }

    /// The name of the disk of a VBD.
    pub fn of(&self, vbd: Option<Uuid>) -> Option<&Name> {
        self.known.get(&vbd?)
    }

    /// Names for tests, without a daemon.
    #[cfg(test)]
    pub fn of_known(known: NamesByVbd) -> Names {
        Names { known, answers: None }
    }
}

/// Requests names periodically; sends `None` if the daemon does not respond.
fn request_names(client: &Client, answers: &SyncSender<Option<NamesByVbd>>) {
    let Ok(runtime) = crate::session::runtime() else { return };
    let mut cache = NameCache::default();
    for round in 0u32.. {
        if round % REFRESH_ROUNDS == 0 {
            cache = NameCache::default();
        }
        // A failed request is repeated in the next round.
        if answers.send(runtime.block_on(cache.known(client)).ok()).is_err() {
            return;
        }
        std::thread::sleep(REQUEST_INTERVAL);
    }
}

/// Names of objects, kept between requests.
#[derive(Debug, Default)]
struct NameCache {
    vms: HashMap<Uuid, String>,
    vdis: HashMap<Uuid, (String, Uuid)>,
    srs: HashMap<Uuid, String>,
}

impl NameCache {
    /// The names of all VBDs. Other objects are requested only if one of them is unknown.
    async fn known(&mut self, client: &Client) -> Result<NamesByVbd, Problem> {
        let vbds = client.vbds(None, None, None).await?;
        if vbds.iter().filter_map(|vbd| vbd.vm).any(|vm| !self.vms.contains_key(&vm)) {
            let vms = client.vms(None).await?;
            self.vms = vms.into_iter().map(|vm| (vm.uuid, vm.name.to_string())).collect();
        }
        if vbds.iter().any(|vbd| !self.vdis.contains_key(&vbd.vdi)) {
            let vdis = client.vdis(None, None).await?;
            self.vdis = vdis.into_iter().map(|vdi| (vdi.uuid, (vdi.name.to_string(), vdi.sr))).collect();
            let srs = client.srs(None).await?;
            self.srs = srs.into_iter().map(|sr| (sr.uuid, sr.name.to_string())).collect();
        }
        Ok(vbds.iter().map(|vbd| (vbd.uuid, self.name(vbd))).collect())
    }

    fn name(&self, vbd: &Vbd) -> Name {
        let (vdi, sr) = self.vdis.get(&vbd.vdi).cloned().unwrap_or_default();
        Name {
            vm: vbd.vm.map(|vm| self.vms.get(&vm).cloned().unwrap_or_else(|| vm.to_string())),
            device: device(vbd),
            vdi,
            vdi_uuid: vbd.vdi,
            sr: self.srs.get(&sr).cloned().unwrap_or_default(),
            health: vbd.health.clone(),
        }
    }
}

/// The usual name of a disk in its guest: `vda`, or `xvda` under Xen.
fn device(vbd: &Vbd) -> String {
    let prefix = if vbd.transport == Transport::Blkif { "xvd" } else { "vd" };
    let mut letters = Vec::new();
    let mut left = u32::from(vbd.position) + 1;
    while left > 0 {
        letters.push(char::from(b'a' + u8::try_from((left - 1) % 26).unwrap_or(0)));
        left = (left - 1) / 26;
    }
    prefix.chars().chain(letters.into_iter().rev()).collect()
}
