//! Names of VMs, devices, VDIs and SRs, and the health of VBDs, from the daemon if there is one.
//!
//! It is asked in a thread of its own every second, so that nothing waits for it. It knows neither pages nor
//! screens. Invariant: without a daemon there are no names, and everything else goes on.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use api::client::Client;
use api::{Health, Problem, Transport, Vbd};
use uuid::Uuid;

/// Time between two requests: a disk's health is shown within two seconds.
const ASKED: Duration = Duration::from_secs(1);
/// Requests after which names that are known are requested again: they may have changed.
const ANEW: u32 = 60;

/// What the daemon calls the disk of a VBD.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Name {
    /// Its machine.
    pub vm: Option<String>,
    /// What its guest calls it.
    pub device: String,
    /// The VDI.
    pub vdi: String,
    /// The VDI's UUID.
    pub vdi_uuid: Uuid,
    /// The repository of the VDI.
    pub sr: String,
    /// The health of the VBD, as the daemon last had it.
    pub health: Health,
}

/// Names by the UUIDs of VBDs.
pub type Known = HashMap<Uuid, Name>;

/// The names that are known by now.
#[derive(Debug, Default)]
pub struct Names {
    known: Known,
    answers: Option<Receiver<Option<Known>>>,
}

impl Names {
    /// Asks this daemon from now on.
    pub fn from_daemon(client: Client) -> Names {
        let (sender, answers) = sync_channel(1);
        // It ends with the process, or when nobody takes its answers.
        let begun = std::thread::Builder::new().name("names".into()).spawn(move || ask(&client, &sender));
        Names { known: Known::new(), answers: begun.is_ok().then_some(answers) }
    }

    /// Waits for the first answer, at most so long.
    pub fn wait(&mut self, at_most: Duration) {
        if let Some(Ok(Some(known))) = self.answers.as_ref().map(|answers| answers.recv_timeout(at_most)) {
            self.known = known;
        }
    }

    /// Takes what has come.
    pub fn take(&mut self) {
        while let Some(Ok(answer)) = self.answers.as_ref().map(Receiver::try_recv) {
            // Names of a daemon that is gone, or slow, stay.
            self.known = answer.unwrap_or_else(|| std::mem::take(&mut self.known));
        }
    }

    /// The name of the disk of a VBD.
    pub fn of(&self, vbd: Option<Uuid>) -> Option<&Name> {
        self.known.get(&vbd?)
    }

    /// Names that are known from elsewhere.
    #[cfg(test)]
    pub fn of_known(known: Known) -> Names {
        Names { known, answers: None }
    }
}

/// Sends what is known, or that there is no answer.
fn ask(client: &Client, answers: &SyncSender<Option<Known>>) {
    let Ok(runtime) = crate::session::runtime() else { return };
    let mut book = Book::default();
    for round in 0u32.. {
        if round % ANEW == 0 {
            book = Book::default();
        }
        // A daemon that does not answer is asked again later.
        if answers.send(runtime.block_on(book.known(client)).ok()).is_err() {
            return;
        }
        std::thread::sleep(ASKED);
    }
}

/// Names of objects.
#[derive(Debug, Default)]
struct Book {
    vms: HashMap<Uuid, String>,
    vdis: HashMap<Uuid, (String, Uuid)>,
    srs: HashMap<Uuid, String>,
}

impl Book {
    /// The names of all VBDs. Other objects are asked for only if one of them is not known.
    async fn known(&mut self, client: &Client) -> Result<Known, Problem> {
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

/// What a guest usually calls the disk: `vda`, or `xvda` under Xen.
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
