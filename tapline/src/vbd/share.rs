//! `tapline vbd share`.

use api::{DiskShare, Problem};
use arguments::number;

use crate::output::say;
use crate::session::Session;

/// Sets the weight of the disk of a block device.
#[derive(clap::Args)]
pub struct Share {
    /// UUID prefix, VM/vda, or the disk's name
    vbd: String,
    /// Its weight, 1 to 10000: a disk with twice the weight of another one gets twice as much; disks have 100 by
    /// default
    #[arg(value_name = "N", value_parser = number::<u32>(1..=10_000))]
    weight: u32,
}

impl Share {
    /// Runs the verb.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let asked = DiskShare { weight: self.weight };
        let vbd = session.client.vbd_share(session.vbd(&self.vbd).await?, &asked).await?;
        if session.json() {
            return session.value(&vbd);
        }
        say(&format!("weight: {}\n", vbd.share_weight));
        Ok(())
    }
}
