//! `/statistics`.

use uuid::Uuid;

use super::Client;
use super::target::Target;
use crate::{DiskStatistics, Problem, VbdHistory};

impl Client {
    /// Lists the statistics of all plugged block devices, without latencies. With `layers` also those of the layers
    /// above and beneath them; this queries the guests.
    pub async fn statistics(&self, layers: bool) -> Result<Vec<DiskStatistics>, Problem> {
        self.get(&Target::new("statistics").query("layers", Some(layers))).await
    }

    /// Gets the last day of a block device, by minute.
    pub async fn vbd_history(&self, vbd: Uuid) -> Result<VbdHistory, Problem> {
        self.get(&Target::verb("vbds", vbd, "history")).await
    }

    /// Gets the statistics of a plugged block device, with what is above and beneath it.
    pub async fn vbd_statistics(&self, vbd: Uuid) -> Result<DiskStatistics, Problem> {
        self.get(&Target::verb("vbds", vbd, "statistics")).await
    }
}
