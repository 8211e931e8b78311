//! Stages: write samples in any process, and add them to a transaction later (docs/design/0013-staged-samples.md).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use penstock_error::{Context as _, Error, Result};
use penstock_format::Id;
use penstock_format::files::FileRef;
use penstock_format::ids::Run;
use penstock_format::manifest::Fragment;
use penstock_format::schema::ColumnSpec;
use penstock_format::transit::stage::Stage;
use penstock_tensor::Dtype;

use crate::commit::transaction::Transaction;
use crate::snapshot::Snapshot;
use crate::snapshot::values::check_stored_as;
use crate::store::datafile::DataFile;

/// Return the row ids of the fragments with these data files. A merge may have added a fragment whose samples had been deleted under other
/// row ids. Of such copies, the one with the most samples counts. Cost: reads the manifest.
fn live_copies(snapshot: &Snapshot, files: &HashSet<Id>) -> Result<HashMap<Id, Vec<Run>>> {
    let (mut known, mut hidden) = (HashMap::<Id, Vec<Run>>::new(), None);
    for (file, found) in snapshot.rows_of_files(None, files)? {
        let Some(runs) = known.insert(file, found.clone()) else { continue };
        let hidden = match &mut hidden {
            Some(hidden) => hidden,
            none => none.insert(snapshot.not_alive()?),
        };
        let live = |runs: &[Run]| runs.iter().map(|run| run.count - hidden.count_in(run.first..run.end())).sum::<u64>();
        if live(&runs) > live(&found) {
            known.insert(file, runs);
        }
    }
    Ok(known)
}

/// Make the error for a stage whose column has another dtype.
fn unlike(spec: &ColumnSpec, staged: Dtype, here: Dtype) -> Error {
    let name = &spec.name;
    let text = format!("it has column `{name}` as {}, but here it is {}", staged.name(), here.name());
    let hint = match here.widens_to(staged) {
        true => format!("widen column `{name}` to {} first, or stage the samples again", staged.name()),
        false => "stage the samples again".to_owned(),
    };
    Error::new("invalid-argument", text).column(name).hint(hint)
}

impl Transaction {
    /// End the transaction without a commit: write its new samples, and return them as a stage. Cost: as for `commit`, without the record.
    pub fn into_stage(mut self) -> Result<Stage> {
        self.state.check_open()?;
        self.close_fragment()?;
        // A stage is known by its data files, and a fragment of nulls has none.
        if self.appended.writer.fragments.iter().any(|fragment| fragment.files.is_empty()) {
            let text =
                "cannot stage: a run of samples has only nulls in tiled columns of fixed shape, and no other columns";
            return Err(Error::new("invalid-argument", text)
                .hint("append these samples instead, or give them a value in another column"));
        }
        self.appended.writer.store_small()?;
        self.sync()?;
        self.state.close();
        let (dataset, features) = (self.base.record().dataset, self.appended.writer.features);
        Ok(Stage {
            dataset,
            gc_epoch: self.gc_epoch,
            features,
            fragments: std::mem::take(&mut self.appended.writer.fragments),
        })
    }

    /// Add the samples of stages, and return their row ids for each stage. They are final for a stage that was committed already, and provisional
    /// for others. Cost: reads the manifest, and a tail for each data file.
    pub fn add(&mut self, stages: &[Stage]) -> Result<Vec<Vec<Run>>> {
        self.state.check_open()?;
        self.check_repeatable("add stages")?;
        for stage in stages {
            self.check_stage(stage)?;
        }
        self.close_fragment()?;
        let (seen, _) = self.view()?;
        let first_files = stages
            .iter()
            .flat_map(|stage| &stage.fragments)
            .filter_map(|fragment| Some(fragment.files.first()?.id))
            .collect();
        let mut known = live_copies(&seen, &first_files)?;
        let mut new: Vec<&Fragment> = Vec::new();
        let mut added: HashSet<Id> = HashSet::new();
        for stage in stages {
            let is_known =
                |fragment: &&Fragment| fragment.files.first().is_some_and(|file| known.contains_key(&file.id));
            match stage.fragments.iter().filter(is_known).count() {
                0 => {
                    let own = stage.fragments.iter();
                    new.extend(own.filter(|fragment| fragment.files.first().is_some_and(|file| added.insert(file.id))));
                }
                all if all == stage.fragments.len() => {}
                some => {
                    let text = format!(
                        "cannot add a stage: the snapshot has only {some} of its {} fragments",
                        stage.fragments.len()
                    );
                    return Err(Error::new("invalid-argument", text)
                        .hint("a merge or a copied commit took only part of the stage; stage the samples again"));
                }
            }
        }
        let files = self.staged_files(&new)?;
        self.learn_words(&files)?;
        for (stage, fragment) in
            stages.iter().flat_map(|stage| stage.fragments.iter().map(move |fragment| (stage, fragment)))
        {
            let Some(id) = fragment.files.first().map(|file| file.id).filter(|id| added.remove(id)) else { continue };
            known.insert(id, vec![self.appended.writer.link(fragment.clone(), stage.features)]);
            self.gc_epoch = self.gc_epoch.min(stage.gc_epoch);
            self.appended.columns.extend(fragment.files.iter().flat_map(|file| &file.columns));
        }
        let runs = |fragment: &Fragment| {
            fragment.files.first().and_then(|file| known.get(&file.id)).cloned().unwrap_or_default()
        };
        Ok(stages.iter().map(|stage| stage.fragments.iter().flat_map(runs).collect()).collect())
    }

    /// Check that a stage belongs to this dataset, and that its columns exist.
    fn check_stage(&self, stage: &Stage) -> Result<()> {
        let place = self.base.context.storage.uri();
        if stage.dataset != self.base.record().dataset {
            return Err(Error::new(
                "invalid-argument",
                format!("cannot add a stage to `{place}`: it is a stage of another dataset"),
            )
            .hint("make the stage with this dataset's ds.stage"));
        }
        let mut columns = stage.fragments.iter().flat_map(|fragment| &fragment.files).flat_map(|file| &file.columns);
        match columns.find(|column| !self.base.schema.has_column(**column)) {
            None => Ok(()),
            Some(column) => {
                let text = format!(
                    "cannot add a stage to `{place}`: it has a column with id {column}, which this snapshot lacks"
                );
                Err(Error::new("invalid-argument", text)
                    .hint("the column was dropped, or added on another branch; stage the samples again"))
            }
        }
    }

    /// Open the data files of fragments, and check that they fit the schema. Cost: one concurrent request per file.
    fn staged_files(&self, fragments: &[&Fragment]) -> Result<Vec<Arc<DataFile>>> {
        let context = &self.base.context;
        let files: Vec<(&FileRef, u64)> =
            fragments.iter().flat_map(|fragment| fragment.files.iter().map(|file| (file, fragment.samples))).collect();
        context.open_tails(files.iter().copied()).context(|| "cannot add a stage".to_owned())?;
        let open = |(file, samples): &(&FileRef, u64)| {
            let opened = context.file(file, *samples)?;
            for chunk in &opened.tail.chunks {
                let Some(spec) = self.base.schema.column_by_id(chunk.column) else { continue };
                if let Err(error) = check_stored_as(&opened, chunk, spec) {
                    let (dtype, _) = spec.kind.stored()?;
                    // Another branch may have a wider dtype.
                    return Err(if chunk.dtype == dtype { error } else { unlike(spec, chunk.dtype, dtype) });
                }
            }
            Ok(opened)
        };
        files.iter().map(open).collect::<Result<_>>().context(|| "cannot add a stage".to_owned())
    }

    /// Add the words in the dictionaries of data files.
    fn learn_words(&mut self, files: &[Arc<DataFile>]) -> Result<()> {
        let before = self.words.mark();
        let base = self.base.clone();
        let mut chunks = files.iter().flat_map(|file| &file.tail.chunks);
        let learned = chunks.try_for_each(|chunk| match &chunk.dictionary {
            Some(words) => self.words.learn(&base, chunk.column, words.iter()),
            None => Ok(()),
        });
        learned.inspect_err(|_| self.words.return_to(&before))
    }
}
