//! `tapline vbd share`: sets a disk's share of its storage.

use api::{DiskShare, Problem};
use arguments::number;

use crate::output::say;
use crate::session::Session;

/// Arguments of `vbd share`.
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
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let request = DiskShare { weight: self.weight };
        let vbd = session.client.vbd_share(session.vbd(&self.vbd).await?, &request).await?;
        if session.json() {
            return session.value(&vbd);
        }
        say(&format!("weight: {}\n", vbd.share_weight));
        Ok(())
    }
}
