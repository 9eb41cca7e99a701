//! `tapline host`: the host and its daemon.

use api::{Backup, Difference, Host, HostDrain, HostReconcile, Problem};
use arguments::number;
use control::size::readable;

use crate::column::{Column, Uuids};
use crate::session::{Listing, Session, Waiting};

/// Operations on the host.
#[derive(clap::Subcommand)]
pub enum HostVerb {
    /// Show the host, its configured limits and its current usage
    Show,
    /// Unplug all disks and flush everything, before the host shuts down
    Drain {
        /// Grace period before forced unplug; everything that was acknowledged is flushed in either case
        #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = number::<u32>(0..=u64::MAX))]
        timeout: u32,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Compare running disks and repositories with the catalogue, and update it where the outcome is certain
    ///
    /// Compares the files of each running disk, disk processes without a plugged VBD, and the files and inventories of
    /// attached repositories. The catalogue is updated from a running disk; what differs in a repository is only
    /// reported: 'tapline sr scan' records it.
    Reconcile {
        /// Only report differences; change nothing
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        listing: Listing,
    },
    /// List the backups of the catalogue; `taplined --restore` restores one
    Backups {
        #[command(flatten)]
        listing: Listing,
    },
    /// Create a backup of the catalogue now
    Backup,
}

type HostColumn = Column<Host>;

const COLUMNS: &[HostColumn] = &[
    HostColumn::new("uuid", |host, uuids| uuids.show(host.uuid)),
    HostColumn::new("name", |host, _| host.name.clone()),
    HostColumn::new("taplined", |host, _| host.version.clone()),
    HostColumn::new("started", |host, _| format!("{:.0}", host.started)),
    HostColumn::new("processors", |host, _| host.cpus.to_string()),
    HostColumn::new("memory", |host, _| readable(host.memory)),
    HostColumn::new("plugged", |host, _| host.plugged.to_string()),
    HostColumn::new("plugging", |host, _| host.plugging.to_string()),
    HostColumn::new("open tasks", |host, _| host.tasks.to_string()),
    HostColumn::new("plug window", |host, _| host.limits.plug_window.to_string()),
    HostColumn::new("worker pool size", |host, _| host.limits.worker_pool_size.to_string()),
    HostColumn::new("worker memory", |host, _| readable(host.limits.worker_memory)),
];

type BackupColumn = Column<Backup>;

const BACKUPS: &[BackupColumn] = &[
    BackupColumn::new("created", |backup, _| format!("{:.0}", backup.created)),
    BackupColumn::new("reason", |backup, _| backup.reason.to_string()),
    BackupColumn::new("size", |backup, _| readable(backup.size)).right(),
    BackupColumn::new("file", |backup, _| backup.file.clone()),
];

type DifferenceColumn = Column<Difference>;

const DIFFERENCES: &[DifferenceColumn] = &[
    DifferenceColumn::new("kind", |difference, _| difference.kind.word().into()),
    DifferenceColumn::new("sr", |difference, uuids| uuids.show_some(difference.sr)),
    DifferenceColumn::new("vdi", |difference, uuids| uuids.show_some(difference.vdi)),
    DifferenceColumn::new("vbd", |difference, uuids| uuids.show_some(difference.vbd)),
    DifferenceColumn::new("catalogue", |difference, _| difference.catalogue.join(" on ")).wide(),
    DifferenceColumn::new("found", |difference, _| difference.found.join(" on ")).wide(),
    DifferenceColumn::new("result", result),
];

/// What was done about a difference, or can be done.
fn result(difference: &Difference, _: Uuids) -> String {
    match &difference.problem {
        Some(problem) => problem.to_string(),
        None if difference.healed => "catalogue updated from the disk".into(),
        None => "the catalogue can be updated from the disk".into(),
    }
}

impl HostVerb {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        match self {
            HostVerb::Show => session.show(&session.client.host().await?, COLUMNS),
            HostVerb::Drain { timeout, waiting } => {
                session.complete(session.client.host_drain(&HostDrain { timeout }).await?, waiting).await
            }
            HostVerb::Reconcile { dry_run, listing } => {
                let differences = session.client.host_reconcile(&HostReconcile { dry_run }).await?;
                session.list(&differences, DIFFERENCES, &listing)
            }
            HostVerb::Backups { listing } => session.list(&session.client.host_backups().await?, BACKUPS, &listing),
            HostVerb::Backup => session.show(&session.client.host_backup().await?, BACKUPS),
        }
    }
}
