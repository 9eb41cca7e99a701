//! `tapline vbd limit`: limits the requests and bytes per second of a disk.

use api::{Code, DiskLimits, Problem};
use arguments::LimitWords;
use control::limits::Limits;

use crate::output::say;
use crate::session::Session;

/// Arguments of `vbd limit`.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("limits").required(true).multiple(true).args(arguments::LIMITS).arg("none"))]
pub struct Limit {
    /// UUID prefix, VM/vda, or the disk's name
    vbd: String,
    /// All limits; those not given are removed.
    #[command(flatten)]
    words: LimitWords,
    /// Remove all limits
    #[arg(long, conflicts_with_all = arguments::LIMITS, conflicts_with = "burst")]
    none: bool,
}

impl Limit {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let limits = of_words(&self.words)?.unwrap_or_default();
        let vbd = session.client.vbd_limit(session.vbd(&self.vbd).await?, &limits).await?;
        if session.json() {
            return session.value(&vbd);
        }
        say(&match vbd.limits {
            Some(limits) => format!("limits: {}\n", shown(&limits)),
            None => "the disk has no limits\n".into(),
        });
        Ok(())
    }
}

/// The limits in the API's type; `None` if none are given.
pub fn of_words(words: &LimitWords) -> Result<Option<DiskLimits>, Problem> {
    let limits = words
        .limits()
        .map_err(|error| Problem { advice: error.advice, ..Problem::new(Code::Invalid, error.message) })?;
    Ok(limits.map(|limits| {
        let Limits { iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth, burst_ms } = limits;
        DiskLimits { iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth, burst_ms }
    }))
}

/// Formats limits for users.
pub fn shown(limits: &DiskLimits) -> String {
    let DiskLimits { iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth, burst_ms } = *limits;
    Limits { iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth, burst_ms }.shown()
}
