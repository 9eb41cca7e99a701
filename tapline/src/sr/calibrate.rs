//! `tapline sr calibrate`: measures the I/O sizes that suit a repository's storage.

use api::{Problem, SrCalibrate, SrCalibrated, SrPolicy};
use arguments::number;
use control::size::readable;

use crate::session::{Outcome, Session, Waiting, print};

/// Arguments of `sr calibrate`.
#[derive(clap::Args)]
pub struct Calibrate {
    /// Name or UUID prefix
    sr: String,
    /// Only read an image file of it, which works while its disks are used; what they do is measured too. Otherwise a
    /// file of 256 MiB is written to that nothing is left of
    #[arg(long)]
    read_only: bool,
    /// The disk whose image file is read [default: the largest one that is full of data]
    #[arg(long, requires = "read_only")]
    vdi: Option<String>,
    /// Duration of the measurement in seconds [default: 45]
    #[arg(long, value_name = "SECONDS", value_parser = number::<u32>(1..=3600))]
    seconds: Option<u32>,
    /// Forget what was found before; measure nothing
    #[arg(long, conflicts_with_all = ["read_only", "vdi", "seconds"])]
    forget: bool,
    #[command(flatten)]
    waiting: Waiting,
}

impl Calibrate {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let Calibrate { sr, read_only, vdi, seconds, forget, waiting } = self;
        let uuid = session.sr(&sr).await?;
        if forget {
            return session.complete(session.client.sr_policy_forget(uuid).await?, waiting).await;
        }
        let vdi = match vdi {
            Some(vdi) => Some(session.vdi(&vdi).await?),
            None => None,
        };
        let request = SrCalibrate { read_only, vdi, seconds };
        match session.outcome(session.client.sr_calibrate(uuid, &request).await?, waiting).await? {
            Outcome::Done(found) => {
                let found: SrCalibrated = serde_json::from_value(found)
                    .map_err(|error| Problem::failed("parse the calibration's result", error))?;
                print(&api::visible(&format!("{}\n", summary(&found.policy))))
            }
            Outcome::Printed => Ok(()),
        }
    }
}

/// Formats a policy and its reason.
pub fn summary(policy: &SrPolicy) -> String {
    let split = policy.split.map_or_else(|| "none".to_owned(), readable);
    let merge = policy.merge.map_or_else(|| "none".to_owned(), readable);
    let SrPolicy { device, measured, why, .. } = policy;
    format!("split {split}, merge {merge}: {why}; measured {measured:.0} on {}", device.name)
}
