package headrace.tests;

import java.util.List;
import java.util.Map;
import org.elasticsearch.ingest.AbstractProcessor;
import org.elasticsearch.ingest.IngestDocument;
import org.elasticsearch.ingest.Processor;
import org.elasticsearch.plugins.IngestPlugin;
import org.elasticsearch.plugins.Plugin;
import org.elasticsearch.script.ScriptException;

/** The processor "act" does what the document's field "do" says: throws, drops, or sets fields such as _index. */
public class ActingPlugin extends Plugin implements IngestPlugin {
    @Override
    public Map<String, Processor.Factory> getProcessors(Processor.Parameters parameters) {
        return Map.of("act", (factories, tag, description, config) -> new Acting(tag, description));
    }

    private static final class Acting extends AbstractProcessor {
        Acting(String tag, String description) {
            super(tag, description);
        }

        @Override
        public String getType() {
            return "act";
        }

        @Override
        public IngestDocument execute(IngestDocument document) throws Exception {
            if (document.hasField("do") == false) {
                return document;
            }
            Map<?, ?> todo = document.getFieldValue("do", Map.class);
            if (todo.containsKey("drop")) {
                return null;
            }
            if ("script".equals(todo.get("throw"))) {
                String text = (String) todo.get("text");
                throw new ScriptException(text, new ArithmeticException(text), List.of(), "ctx.n / 0", "painless");
            }
            if (todo.containsKey("throw")) {
                Class<?> kind = Class.forName((String) todo.get("throw"));
                throw (Exception) kind.getConstructor(String.class).newInstance((String) todo.get("text"));
            }
            for (Map.Entry<?, ?> each : todo.entrySet()) {
                document.setFieldValue((String) each.getKey(), each.getValue());
            }
            return document;
        }
    }
}
