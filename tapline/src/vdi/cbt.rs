//! `vdi cbt` and `vdi changed`: which blocks of a disk have changed, for incremental backups.

use api::{ChangesFormat, Problem, Vdi};
use control::size::readable;

use super::Disk;
use crate::column::Column;
use crate::session::{Session, Waiting, print};
use crate::word;

/// Operations on the recording of changed blocks.
#[derive(clap::Subcommand)]
pub enum CbtVerb {
    /// Record which blocks of a disk change from now on; it may be plugged
    Enable {
        #[command(flatten)]
        vdi: Disk,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Stop recording which blocks of a disk change; the maps of its snapshots stay
    Disable {
        #[command(flatten)]
        vdi: Disk,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Show whether changes of a disk are recorded, since when, and why not since earlier
    Show(Disk),
}

/// Arguments of `vdi changed`.
#[derive(clap::Args)]
#[group(skip)]
pub struct Changed {
    /// The earlier snapshot: its name or UUID prefix
    #[arg(value_name = "FROM")]
    from: String,
    #[command(flatten)]
    to: Disk,
    /// How the parts are listed. xapi: a base64 bitmap of blocks of 64 KiB, as XenAPI's VDI.list_changed_blocks
    #[arg(long, default_value = "extents", value_parser = word::one_of::<ChangesFormat>(&["extents", "xapi"]))]
    format: ChangesFormat,
}

type TrackingColumn = Column<Vdi>;

const COLUMNS: &[TrackingColumn] = &[
    TrackingColumn::new("uuid", |vdi, uuids| uuids.show(vdi.uuid)),
    TrackingColumn::new("name", |vdi, _| vdi.name.to_string()),
    TrackingColumn::new("recorded", |vdi, _| recorded(vdi).into()),
    TrackingColumn::new("since", |vdi, _| {
        vdi.cbt.as_ref().and_then(|cbt| cbt.since).map(|at| format!("{at:.0}")).unwrap_or_default()
    }),
    TrackingColumn::new("map", |vdi, _| {
        vdi.cbt.as_ref().and_then(|cbt| cbt.maps.last()).map(|map| map.uuid.to_string()).unwrap_or_default()
    }),
    TrackingColumn::new("earlier changes", |vdi, _| {
        vdi.cbt.as_ref().and_then(|cbt| cbt.ended.clone()).map(|why| format!("not known: {why}")).unwrap_or_default()
    }),
];

/// Whether changes are recorded, in words.
fn recorded(vdi: &Vdi) -> &'static str {
    match &vdi.cbt {
        Some(cbt) if vdi.snapshot_of.is_some() && !cbt.maps.is_empty() => "until the snapshot",
        Some(cbt) if cbt.enabled && cbt.maps.is_empty() => "from the next plug on",
        Some(cbt) if cbt.enabled => "yes",
        _ => "no",
    }
}

impl CbtVerb {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let client = &session.client;
        match self {
            CbtVerb::Enable { vdi, waiting } => {
                session.complete(client.vdi_cbt_enable(vdi.find(session).await?).await?, waiting).await
            }
            CbtVerb::Disable { vdi, waiting } => {
                session.complete(client.vdi_cbt_disable(vdi.find(session).await?).await?, waiting).await
            }
            CbtVerb::Show(vdi) => session.show(&client.vdi(vdi.find(session).await?).await?, COLUMNS),
        }
    }
}

impl Changed {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let to = session.client.vdi(self.to.find(session).await?).await?;
        let from = session.snapshot_of(to.disk(), &self.from).await?;
        let changes = session.client.vdi_changes(to.uuid, from, self.format).await?;
        if session.json() {
            return session.value(&changes);
        }
        if let Some(bitmap) = &changes.bitmap {
            return print(&format!("{bitmap}\n"));
        }
        let mut text = format!("{:>16} {:>16}\n", "START", "LENGTH");
        for extent in changes.extents.iter().flatten() {
            text.push_str(&format!("{:>16} {:>16}\n", extent.start, extent.length));
        }
        text.push_str(&format!("{} of {} may have changed\n", readable(changes.changed), readable(changes.size)));
        print(&text)
    }
}
