//! `vm run`: boots a thin clone of a disk with its console here; machine and clone are removed at the end unless kept.

use api::{Name, Problem, VdiClone};
use uuid::Uuid;

use super::console::{self, ConsoleEnd};
use super::create::{CreatedVm, Hardware};
use crate::attach::{ensure_vbd, uuid};
use crate::output::say;
use crate::session::{Session, print};

/// Arguments of `vm run`.
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
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let keep = self.keep;
        let mut made = CreatedVm::default();
        let vm = match self.start(session, &mut made).await {
            Ok(vm) => vm,
            Err(problem) => return Err(made.roll_back(session, problem).await),
        };
        let left = console::attach(session, vm).await;
        if keep {
            print(&format!("{vm}\n"))?;
            return left.map(drop);
        }
        match left {
            Ok(ConsoleEnd::ByUser) => {
                say("tapline: stopping the machine and removing it and its disk; --keep would have kept them\n");
                made.remove(session).await
            }
            Ok(ConsoleEnd::Ended) => made.remove(session).await,
            Err(problem) => Err(made.roll_back(session, problem).await),
        }
    }

    /// Creates the machine and starts it.
    async fn start(self, session: &Session, made: &mut CreatedVm) -> Result<Uuid, Problem> {
        let Run { image, name, hardware, .. } = self;
        let client = &session.client;
        let from = client.vdi(session.vdi(&image).await?).await?;
        let name = match name {
            Some(name) => name,
            None => {
                // As many digits as of a displayed UUID, so that a collision is unlikely.
                let number = &Uuid::new_v4().simple().to_string()[..8];
                format!("{}-{number}", from.name)
                    .parse()
                    .or_else(|_| format!("run-{number}").parse())
                    .map_err(|why: String| Problem::failed("make a name for the machine", why))?
            }
        };
        let request = VdiClone { name: Some(name.clone()), ..VdiClone::default() };
        let vdi = uuid(&session.finish(client.vdi_clone(from.uuid, &request).await?).await?)?;
        made.vdis.push(vdi);
        let machine = hardware.machine(session, name)?;
        let vm = uuid(&session.finish(client.vm_create(&machine).await?).await?)?;
        made.vm = Some(vm);
        ensure_vbd(session, vdi, Some(vm), None).await?;
        session.finish(client.vm_start(vm).await?).await?;
        Ok(vm)
    }
}
