//! Makes the recipe of a loader from its JSON options and sources.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use penstock_error::{Error, Result};
use penstock_loader::engine::parts::choose_results_in_parts;
use penstock_loader::engine::recipe::{OnCorrupt, Recipe};
use penstock_loader::order::cut::{BatchCut, LastBatch};
use penstock_loader::order::mixture::{Mix, Program, source_seed};
use penstock_loader::order::sequence::{Alias, Order, Sequence};
use penstock_loader::source::view::Source;
use penstock_loader::source::window::Window;
use penstock_loader::transform::operation::{Operation, Transform};
use penstock_loader::transform::output::MediaForm;
use penstock_loader::transform::pipeline::Pipeline;
use serde::Deserialize;

/// The options that `penstock/loader/` has checked and passes as JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Declared {
    pub names: Vec<String>,
    /// Name and source column of each result.
    outputs: Vec<(String, String)>,
    transform: Vec<Transform>,
    decode: bool,
    /// The results that are lists in every batch, although they consist of pixels.
    listed: Vec<String>,
    seed: u64,
    orders: Vec<Order>,
    mix: Option<Mix>,
    /// Whether the sources are joined. They then share the first order.
    joined: bool,
    /// For each source, the codes in batches of the codes of its columns of words; see `Source::codes`.
    pub codes: Vec<Vec<(String, Vec<i64>)>>,
    order_block_samples: u64,
    global_batch_size: u64,
    last_batch: LastBatch,
    /// Epoch and draw at which step 0 begins.
    base: (u64, u64),
    rank: u64,
    world_size: u64,
    row_ids: bool,
    on_corrupt: String,
    pub threads: usize,
    pub memory_bytes: u64,
    /// Upper limit on the bytes that windows hold.
    window_bytes: u64,
}

/// Make the recipe of a loader: where its samples come from, in which order, and how batches are made of them.
pub fn recipe(declared: &Declared, mut sources: Vec<Source>, weights: Vec<Option<Arc<Alias>>>) -> Result<Recipe> {
    // Each column is read once, even if several results need it.
    let mut columns: Vec<&str> = Vec::new();
    let mut outputs = Vec::new();
    for (name, column) in &declared.outputs {
        let known = columns.iter().position(|known| known == column).unwrap_or_else(|| {
            columns.push(column);
            columns.len() - 1
        });
        outputs.push((name.clone(), known));
    }
    for source in &mut sources {
        source.columns = columns.iter().map(|column| source.column(column)).collect::<Result<_>>()?;
    }
    check_same_columns(&declared.names, &sources)?;
    let transforms = with_formats(&declared.transform, &outputs, &sources);
    let program = program(declared, &sources, weights)?;
    let cut = BatchCut::new(
        program.len(),
        declared.global_batch_size,
        declared.last_batch,
        declared.rank,
        declared.world_size,
    )?;
    let mut pipeline = Pipeline::new(
        outputs,
        &sources[0].columns,
        &transforms,
        if declared.decode { MediaForm::Decoded } else { MediaForm::Stored },
        declared.seed,
    )?;
    pipeline.list(&declared.listed);
    let on_corrupt = match declared.on_corrupt.as_str() {
        "raise" => OnCorrupt::Raise,
        "substitute" => OnCorrupt::Substitute,
        "mask" => OnCorrupt::Mask,
        other => {
            return Err(Error::new(
                "invalid-argument",
                format!("on_corrupt=`{other}`, expected `raise`, `substitute` or `mask`"),
            ));
        }
    };
    let windows = sources
        .iter()
        .zip(&declared.orders)
        .map(|(source, order)| Window::of(order, source, declared.mix.is_some() || declared.joined))
        .collect();
    choose_results_in_parts(&mut pipeline, &sources);
    Ok(Recipe {
        sources,
        program,
        windows,
        cut,
        base: declared.base,
        pipeline,
        row_ids: declared.row_ids,
        on_corrupt,
        fetched_bytes: AtomicU64::new(0),
        window_bytes: declared.window_bytes,
    })
}

/// Check that each column can be read from all sources as from the first one.
fn check_same_columns(names: &[String], sources: &[Source]) -> Result<()> {
    for (index, source) in sources.iter().enumerate().skip(1) {
        for (one, other) in sources[0].columns.iter().zip(&source.columns) {
            let (kind, other_kind) = (&one.kind, &other.kind);
            let are_words = kind.has_codes() && other_kind.has_codes();
            let are_lists = kind.listed_classes().is_some() && other_kind.listed_classes().is_some();
            let by_word = (are_words || are_lists) && source.codes_of(other).is_some();
            let are_boxes = kind.box_format().is_some() && other_kind.box_format().is_some();
            let converted = are_boxes && kind.of() == other_kind.of();
            if !kind.reads_as(other_kind) && !by_word && !converted {
                let text = format!("cannot mix `{}` and `{}`: column `{}` differs", names[0], names[index], one.name);
                return Err(Error::new("invalid-argument", text)
                    .hint("list in columns= only columns that are the same in every dataset"));
            }
        }
    }
    Ok(())
}

/// Return the order in which the samples of all sources are drawn.
fn program(declared: &Declared, sources: &[Source], weights: Vec<Option<Arc<Alias>>>) -> Result<Program> {
    let (seed, block) = (declared.seed, declared.order_block_samples);
    match (declared.joined, declared.orders.first()) {
        (true, Some(order)) => {
            let (samples, weights) = (sources.iter().map(Source::len).sum(), weights.into_iter().next().flatten());
            let sequence = Sequence::new(order.clone(), seed, samples, block, weights)?;
            Ok(Program::joined(seed, sequence, sources.iter().map(Source::len), block))
        }
        _ => {
            let sequences = sources.iter().zip(&declared.orders).zip(weights).enumerate().map(
                |(number, ((source, order), weights))| {
                    Sequence::new(order.clone(), source_seed(seed, number), source.len(), block, weights)
                },
            );
            let sequences = sequences.collect::<Result<_>>()?;
            Program::new(seed, sequences, &declared.names, declared.mix.clone(), block)
        }
    }
}

/// Convert boxes that have other formats in other sources to the format of the first source, unless a transform converts them anyway.
fn with_formats(transforms: &[Transform], outputs: &[(String, usize)], sources: &[Source]) -> Vec<Transform> {
    let mut all = transforms.to_vec();
    for (name, column) in outputs {
        let kind = &sources[0].columns[*column].kind;
        let converts = |earlier: &Transform| {
            matches!(earlier.operation, Operation::ConvertBoxes { .. }) && earlier.on.contains(name)
        };
        if let Some(format) = kind.box_format()
            && sources.iter().any(|source| source.columns[*column].kind != *kind)
            && !transforms.iter().any(converts)
        {
            all.push(Transform {
                on: vec![name.clone()],
                operation: Operation::ConvertBoxes { format: format.to_owned() },
            });
        }
    }
    all
}
