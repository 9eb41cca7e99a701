//! `vm run`: a machine on a thin clone of a disk, with its console here; both are gone at the end unless they are kept.

use api::{Name, Problem, VdiClone};
use uuid::Uuid;

use super::console::{self, Left};
use super::create::{Hardware, Made};
use crate::attach::{give, uuid};
use crate::output::say;
use crate::session::{Session, print};

/// Boots a thin clone of a disk.
#[derive(clap::Args)]
pub struct Run {
    /// The disk to clone, for example a template or a snapshot: its name or UUID prefix
    image: String,
    /// Name of the machine and of its disk [default: the name of the disk that is cloned, with a number]
    #[arg(long)]
    name: Option<Name>,
    /// Keep the machine and its disk at the end, and print the machine's UUID
    #[arg(long)]
    keep: bool,
    #[command(flatten)]
    hardware: Hardware,
}

impl Run {
    /// Runs the verb.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let keep = self.keep;
        let mut made = Made::default();
        let vm = match self.start(session, &mut made).await {
            Ok(vm) => vm,
            Err(problem) => return Err(made.unmake_for(session, problem).await),
        };
        let left = console::attach(session, vm).await;
        if keep {
            print(&format!("{vm}\n"))?;
            return left.map(drop);
        }
        match left {
            Ok(Left::ByUser) => {
                say("tapline: stopping the machine and removing it and its disk; --keep would have kept them\n");
                made.unmake(session).await
            }
            Ok(Left::Ended) => made.unmake(session).await,
            Err(problem) => Err(made.unmake_for(session, problem).await),
        }
    }

    /// Makes the machine and starts it.
    async fn start(self, session: &Session, made: &mut Made) -> Result<Uuid, Problem> {
        let Run { image, name, hardware, .. } = self;
        let client = &session.client;
        let from = client.vdi(session.vdi(&image).await?).await?;
        let name = match name {
            Some(name) => name,
            None => {
                // As many digits as are shown of a UUID, so that it hardly ever is taken.
                let number = &Uuid::new_v4().simple().to_string()[..8];
                format!("{}-{number}", from.name)
                    .parse()
                    .or_else(|_| format!("run-{number}").parse())
                    .map_err(|why: String| Problem::failed("make a name for the machine", why))?
            }
        };
        let asked = VdiClone { name: Some(name.clone()), ..VdiClone::default() };
        let vdi = uuid(&session.finish(client.vdi_clone(from.uuid, &asked).await?).await?)?;
        made.vdis.push(vdi);
        let machine = hardware.machine(session, name)?;
        let vm = uuid(&session.finish(client.vm_create(&machine).await?).await?)?;
        made.vm = Some(vm);
        give(session, vdi, Some(vm), None).await?;
        session.finish(client.vm_start(vm).await?).await?;
        Ok(vm)
    }
}
