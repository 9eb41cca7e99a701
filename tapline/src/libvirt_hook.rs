//! `libvirt-hook`: plugs the disks of a libvirt domain before it starts, and unplugs them after it has stopped.
//!
//! libvirt runs it at each step in the life of a domain, with the domain's XML on stdin, and waits for it. It never
//! calls libvirt, which has locked the domain, and prints nothing to stdout, which libvirt would use as the new XML.
//! Invariants: only VBDs whose sockets are in the domain's XML are plugged, each for one domain at a time; only VBDs
//! that are claimed for the domain, or that were hot-plugged into it, are unplugged ([`claims`]).

mod claims;
mod domain;
mod plugging;

use std::io::Read;

use api::Problem;

use crate::failure::Failure;
use crate::output::say;
use crate::session::{How, Session, runtime};
use claims::Claims;
use domain::Domain;

/// Maximum size of a domain's XML in bytes; libvirt's own limit over RPC is 4 MiB.
const XML_MAX: u64 = 16 << 20;

/// Arguments of `libvirt-hook`.
#[derive(Debug, clap::Args)]
pub struct LibvirtHook {
    /// The domain's name
    domain: String,
    /// The step in the domain's life
    operation: String,
    /// What libvirt adds to that
    #[arg(hide = true)]
    _more: Vec<String>,
}

/// The steps at which the hook acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Before a start, including a restore of saved memory and an incoming migration.
    Prepare,
    /// QEMU is running.
    Started,
    /// The domain has stopped or failed to start.
    Release,
    /// libvirt was restarted while the domain was running. A failure would kill the domain.
    Reconnect,
    /// A migration is about to arrive.
    Migrate,
}

impl Step {
    fn of(operation: &str) -> Option<Step> {
        Some(match operation {
            "prepare" => Step::Prepare,
            "started" => Step::Started,
            "release" => Step::Release,
            "reconnect" => Step::Reconnect,
            "migrate" => Step::Migrate,
            _ => return None,
        })
    }
}

/// Runs the command.
pub fn run(hook: &LibvirtHook, how: How) -> Result<(), Failure> {
    let Some(step) = Step::of(&hook.operation) else { return Ok(()) };
    let done = carry_out(step, &hook.domain, how);
    match done {
        // The domain is running: failing here would kill it.
        Err(problem) if matches!(step, Step::Started | Step::Reconnect) => {
            say(&Failure::from(problem).message());
            Ok(())
        }
        done => Ok(done?),
    }
}

fn carry_out(step: Step, name: &str, how: How) -> Result<(), Problem> {
    let run_directory = how.run_directory()?;
    let mut xml = String::new();
    let read = std::io::stdin().take(XML_MAX).read_to_string(&mut xml);
    read.map_err(|error| Problem::failed(format_args!("read the XML of domain {name} from stdin"), error))?;
    let domain = Domain::parse(&xml, &run_directory)
        .map_err(|why| Problem::failed(format_args!("read the XML of domain {name}"), why))?;
    let claims = Claims::of(&run_directory);
    if domain.disks.is_empty() && claims.of_domain(domain.uuid)?.is_empty() {
        return Ok(());
    }
    match step {
        Step::Started => return claims.note_started(domain.uuid),
        Step::Reconnect => return claims.adopt(&domain),
        Step::Prepare | Step::Release | Step::Migrate => {}
    }
    let session = Session::new(how)?;
    runtime()?.block_on(async {
        match step {
            Step::Prepare => plugging::plug(&session, &claims, &domain).await,
            Step::Migrate => plugging::find(&session, &domain).await.map(drop),
            Step::Release => plugging::unplug(&session, &claims, &domain).await,
            Step::Started | Step::Reconnect => Ok(()),
        }
    })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn steps_without_disks_are_ignored() {
        assert_eq!(Step::of("prepare"), Some(Step::Prepare));
        for other in ["start", "stopped", "restore", "attach", "stats", ""] {
            assert_eq!(Step::of(other), None, "{other}");
        }
    }
}
